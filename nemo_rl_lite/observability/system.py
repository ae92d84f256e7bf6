"""Sample the use of this machine and of this process' GPUs in a thread."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import psutil

log = logging.getLogger(__name__)
SAMPLE_S = 2.0
GIB = 2**30
MILLIWATTS = 1000


@dataclass(frozen=True)
class Usage:
    """Sums by metric over `samples` samples since the process started. The difference of two gives the use in between,
    so readers are independent."""

    samples: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)

    def plus(self, sample: Mapping[str, float]) -> "Usage":
        return Usage(self.samples + 1, {name: self.sums.get(name, 0.0) + value for name, value in sample.items()})

    def means_since(self, before: "Usage") -> dict[str, float]:
        """Return the means of the samples after `before`, or of all if `before` is from an earlier process."""
        if before.samples > self.samples:
            before = Usage()
        count = self.samples - before.samples
        sums = self.sums if count else {}
        return {name: (total - before.sums.get(name, 0.0)) / count for name, total in sums.items()}


class System:
    """Readings of the machine and of `gpus`, named as in CUDA_VISIBLE_DEVICES."""

    def __init__(self, gpus: Sequence[str]):
        # The first call starts the measurement of the next one.
        psutil.cpu_percent()
        self._gpus: dict[int, object] = {}
        if gpus:
            self._find(gpus)

    def sample(self) -> dict[str, float]:
        """Return `cpu_util` (percent of all cores), `mem_gb` and `mem_total_gb` of the machine (2**30 bytes). By a
        GPU's number: `gpu.0.util` (percent of the time), `gpu.0.mem_gb`, `.power_w` and `.temp_c`."""
        memory = psutil.virtual_memory()
        sample = {
            "cpu_util": psutil.cpu_percent(),
            "mem_gb": (memory.total - memory.available) / GIB,
            "mem_total_gb": memory.total / GIB,
        }
        for number, gpu in self._gpus.items():
            sample |= {f"gpu.{number}.{name}": value for name, value in _read(self._nvml, gpu).items()}
        return sample

    def _find(self, gpus: Sequence[str]) -> None:
        try:
            import pynvml
        except ImportError:
            log.warning("use of the GPUs is not logged: nvidia-ml-py is not installed")
            return
        self._nvml: ModuleType = pynvml
        try:
            pynvml.nvmlInit()
            for name in gpus:
                by_number = name.isdigit()
                find = pynvml.nvmlDeviceGetHandleByIndex if by_number else pynvml.nvmlDeviceGetHandleByUUID
                handle = find(int(name) if by_number else name)
                self._gpus[int(name) if by_number else pynvml.nvmlDeviceGetIndex(handle)] = handle
        except pynvml.NVMLError as error:
            log.warning("use of the GPUs is not logged in full: %s", error)


def _read(nvml: ModuleType, gpu: object) -> dict[str, float]:
    readings = {
        "util": lambda: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
        "mem_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / MILLIWATTS,
        "temp_c": lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
    }
    values = {}
    for name, read in readings.items():
        try:
            values[name] = read()
        except nvml.NVMLError as error:
            log.debug("%s: %s", name, error)
    return values


class Sampler:
    """Thread that adds a sample to `usage` every SAMPLE_S seconds."""

    def __init__(self, gpus: Sequence[str]):
        self.usage = Usage()
        threading.Thread(target=self._sample, args=(gpus,), name="system", daemon=True).start()

    def _sample(self, gpus: Sequence[str]) -> None:
        # NVML is slow to start, so the thread starts it.
        system = System(gpus)
        while True:
            time.sleep(SAMPLE_S)
            self.usage = self.usage.plus(system.sample())
