"""Time named phases, and compute rates of work and shares of a GPU's limits."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_lite.observability.live import doing
from nemo_rl_lite.observability.profiling import span

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class PolicySpeed:
    """Rates from the FLOPs of the whole policy."""

    ranks: int
    """GPUs of the policy, or its ranks on CPUs."""
    peak: float | None
    """Dense bfloat16 FLOP/s of one GPU; None on CPUs and for an unknown GPU."""

    def training(self, flops: float, seconds: float) -> dict[str, float]:
        """Return the training rate in TFLOP/s, and its share of the peak if known."""
        return self._named("train_flops_per_gpu", "train_fp_utilization", flops, seconds)

    def logprobs(self, flops: float, seconds: float) -> dict[str, float]:
        """Return the same for logprob passes."""
        rate, share = "policy_and_reference_logprobs_flops_per_gpu", "policy_and_reference_logprobs_fp_utilization"
        return self._named(rate, share, flops, seconds)

    def _named(self, rate: str, share: str, flops: float, seconds: float) -> dict[str, float]:
        reached = flops / seconds / self.ranks
        return {rate: reached / TERA} | ({} if self.peak is None else {share: reached / self.peak})


@dataclass(frozen=True)
class DecodingSpeed:
    """Rates from the engines' decoding steps."""

    step_bytes: float
    """Bytes that an engine's GPU reads per step for the weights."""
    token_bytes: float
    """Bytes that it reads per step for each cached token of the decoded sequences."""
    bandwidth: float | None
    """Bytes/s of its memory; None on CPUs and for an unknown GPU."""

    def metrics(self, steps: int, cached: int, seconds: float) -> dict[str, float]:
        """Return `generation_read_gb_per_sec_per_gpu` and, if the bandwidth is known, `generation_bandwidth_share`.
        Steps, read `cached` tokens and seconds are sums over the engines. Empty without steps."""
        if not steps or not seconds:
            return {}
        rate = (steps * self.step_bytes + cached * self.token_bytes) / seconds
        share = {} if self.bandwidth is None else {"generation_bandwidth_share": rate / self.bandwidth}
        return {"generation_read_gb_per_sec_per_gpu": rate / GIGA} | share


# Unix time of `time.perf_counter()` = 0.
_UNIX_ZERO = time.time() - time.perf_counter()


@dataclass(frozen=True)
class Phase:
    """Begin and end of a phase, in seconds of `time.perf_counter()`."""

    name: str
    begin: float
    end: float


class Timer:
    """Sums seconds by name: `with timer("generation"): ...`, then `take()`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.phases: list[Phase] = []
        """All phases, in the order of their ends."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with span(name), doing(name):
                yield
        finally:
            ended = time.perf_counter()
            self.add(name, ended - started)
            self.phases.append(Phase(name, started, ended))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last `take`."""
        taken, self._seconds = self._seconds, {}
        return taken


class SetupTimer(Timer):
    """Timer of a start-up. Other threads can wait for the end of a part."""

    def __init__(self) -> None:
        super().__init__()
        self._ended, self._changed = set[str](), threading.Condition()

    def add(self, name: str, seconds: float) -> None:
        super().add(name, seconds)
        with self._changed:
            self._ended.add(name)
            self._changed.notify_all()

    def wait_for(self, *names: str) -> None:
        """Wait until one of these parts has ended in this process."""
        with self._changed:
            self._changed.wait_for(lambda: not self._ended.isdisjoint(names))


def unix_time(at: float) -> float:
    """Convert a time of `time.perf_counter()` in this process to Unix time in seconds."""
    return at + _UNIX_ZERO


SETUP = SetupTimer()
"""Timer of a worker process' start, read by `WorkerProcess.start`."""


_clock: list[float] = []
"""Time of the clock's restart, in seconds of `time.monotonic()`."""


def restart_clock() -> None:
    """Count `seconds_since_start` from now, because this process did other work before the run."""
    _clock[:] = [time.monotonic()]


def seconds_since_start() -> float:
    """Return the seconds since the start of this process, or since `restart_clock`."""
    if _clock:
        return time.monotonic() - _clock[-1]
    # The program's name, in parentheses, may have spaces. Field 22 is the start, in clock ticks since boot.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
