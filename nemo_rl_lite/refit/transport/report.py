"""What both sides of a refit report, and the checks that compare the two."""

import time
from dataclasses import dataclass, field

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.refit.layout.plan import RefitPlan

# Largest mean difference, in nats, between the logprobs that two implementations of one model give a probe's tokens, by
# policy.precision: in bfloat16 the two round differently, and short probes of correct runs have differed by up to 0.08.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
# The same for engines that compute with 8-bit weights and inputs, whose rounding alone exceeds the limit of bfloat16 in
# a small random model (tests/functional/test_eight_bits.py).
PROBE_TOLERANCE_QUANTIZED = 0.8


@dataclass
class RefitReport:
    """What one side did: seconds by stage, and the checksum of each bucket if checksums were asked for."""

    seconds: dict[str, float] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)

    def add(self, stage: str, started: float) -> float:
        """Add the time since `started` to a stage; returns the time now."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - started
        return now


def compare_checksums(plan: RefitPlan, sent: RefitReport, received: RefitReport, consumer: str) -> None:
    """Raises RefitError naming `consumer` and the bucket whose bytes differ from the producer's."""
    if len(received.checksums) != len(sent.checksums):
        raise RefitError(f"{consumer} received {len(received.checksums)} of {len(sent.checksums)} buckets")
    for index, (theirs, ours) in enumerate(zip(received.checksums, sent.checksums, strict=True)):
        if theirs != ours:
            where = f"bucket {index} ({plan.buckets[index].describe()})"
            raise RefitError(f"{consumer} received other bytes than were sent in {where}")
