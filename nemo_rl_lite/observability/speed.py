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

    def training(self, flops: float, seconds: float) -> dict[str, float]:
        """The rate of training, in TFLOP/s, and its share of the peak where that is known."""
        return self._named("train_flops_per_gpu", "train_fp_utilization", flops, seconds)

    def logprobs(self, flops: float, seconds: float) -> dict[str, float]:
        """The same of logprob passes."""
        rate, share = "policy_and_reference_logprobs_flops_per_gpu", "policy_and_reference_logprobs_fp_utilization"
        return self._named(rate, share, flops, seconds)

    def _named(self, rate: str, share: str, flops: float, seconds: float) -> dict[str, float]:
        reached = flops / seconds / self.ranks
        return {rate: reached / TERA} | ({} if self.peak is None else {share: reached / self.peak})


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
