"""Use of machines and GPUs, with an NVML that is none."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from nemo_rl_lite.observability.system import GIB, System, Usage


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """Eight GPUs; the one with the UUID is number 5 and does not report its power."""
    fake = ModuleType("pynvml")

    def by_uuid(uuid):
        if uuid != "GPU-five":
            raise NVMLError("not found")
        return 5

    def power(gpu):
        if gpu == 5:
            raise NVMLError("not supported")
        return 250_000 + gpu

    fake.__dict__.update(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetIndex=lambda gpu: gpu,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=10 * gpu),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=gpu * GIB),
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetTemperature=lambda gpu, kind: 40 + gpu,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_only_the_gpus_of_the_process_are_read_under_their_number_on_the_machine(nvml):
    sample = System(["3"]).sample()
    of_gpus = {name: value for name, value in sample.items() if name.startswith("gpu")}
    assert of_gpus == {"gpu.3.util": 30.0, "gpu.3.mem_gb": 3.0, "gpu.3.power_w": 250.003, "gpu.3.temp_c": 43.0}


def test_a_gpu_by_its_uuid_and_what_it_does_not_tell(nvml):
    sample = System(["GPU-five"]).sample()
    assert sample["gpu.5.util"] == 50 and "gpu.5.power_w" not in sample


@pytest.mark.parametrize("gpus", [["MIG-unknown"], ["0"]])
def test_without_a_driver_or_a_gpu_that_it_knows_the_rest_is_there(nvml, gpus, caplog):
    if gpus == ["0"]:
        nvml.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError("no driver"))
    assert set(System(gpus).sample()) == {"cpu_util", "mem_gb", "mem_total_gb"}
    assert "use of the GPUs is not logged in full" in caplog.text


def test_means_are_of_what_came_since():
    first = Usage().plus({"util": 10.0}).plus({"util": 30.0})
    later = first.plus({"util": 50.0, "power": 7.0})
    assert first.means_since(Usage()) == {"util": 20.0}
    assert later.means_since(first) == {"util": 50.0, "power": 7.0}
    assert later.means_since(later) == {}
    # A process in place of one that was lost starts counting again.
    assert first.means_since(later) == {"util": 20.0}
