"""Rates of a phase, a GPU, and what share they are of the most that the GPU can do."""

from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class PolicySpeed:
    """Turns FLOPs of the whole policy into rates."""

    ranks: int
    """GPUs of the policy, or its ranks on CPUs."""
    peak: float | None
    """Dense FLOP/s of one of its GPUs in bfloat16; None on CPUs, and for a GPU that is not known."""

    def metrics(self, phase: str, flops: float, seconds: float) -> dict[str, float]:
        """`<phase>_flops_per_gpu` in TFLOP/s and, where the peak is known, `<phase>_fp_utilization`, of a phase that
        took `seconds` for `flops`."""
        rate = flops / seconds / self.ranks
        share = {} if self.peak is None else {f"{phase}_fp_utilization": rate / self.peak}
        return {f"{phase}_flops_per_gpu": rate / TERA} | share


@dataclass(frozen=True)
class DecodingSpeed:
    """Turns what engines have decoded into rates."""

    step_bytes: float
    """Bytes that a GPU of an engine must read in a step of the engine, whatever it decodes."""
    token_bytes: float
    """Bytes that it must read in a step for each token in the KV caches of the sequences that it decodes."""
    bandwidth: float | None
    """Bytes/s of its memory; None on CPUs, and for a GPU that is not known."""

    def metrics(self, steps: int, cached: int, seconds: float) -> dict[str, float]:
        """`generation_read_gb_per_sec_per_gpu` and, where the bandwidth is known, `generation_bandwidth_share`, of
        engines that took `steps` steps, which read `cached` tokens of KV caches, in `seconds`, all of them summed over
        the engines. Empty where nothing was decoded."""
        if not steps or not seconds:
            return {}
        rate = (steps * self.step_bytes + cached * self.token_bytes) / seconds
        share = {} if self.bandwidth is None else {"generation_bandwidth_share": rate / self.bandwidth}
        return {"generation_read_gb_per_sec_per_gpu": rate / GIGA} | share
