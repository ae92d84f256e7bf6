"""Generation engines in Ray actors. Replicas split the prompts between them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from nemo_rl_lite.cluster.workers import Call, WorkerGroup, wait
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.refit.engine.connection import Source


class RemoteGeneration:
    """`Generation` over a group of started engines."""

    def __init__(self, group: WorkerGroup, shares_device: bool):
        self.group, self._shares_device = group, shares_device

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """Split the prompts into contiguous shares; each replica samples with a different seed.

        Raises:
            EngineError: an engine gives a sampled token a logprob that is not finite.
        """
        count = len(self.group)
        bounds = [len(prompts) * replica // count for replica in range(count + 1)]
        shares = [
            (prompts[start:stop], replace(sampling, seed=sampling.seed * count + replica))
            for replica, (start, stop) in enumerate(pairwise(bounds))
        ]
        answers: list[list[Completion]] = wait(self.group.call_each("generate", shares))
        for replica, completions in enumerate(answers):
            _require_finite(replica, completions)
        return [completion for completions in answers for completion in completions]

    def finish_generation(self) -> dict[str, float]:
        """Put engines that share a GPU with the policy to sleep; returns memory metrics from before."""
        held = max(wait(self.group.call("memory")), key=lambda own: own.get("device", 0))
        wait(self.group.call("sleep"))
        return engine_memory(held, self._shares_device) if held else {}

    def wake_weights(self) -> None:
        wait(self.group.call("wake_weights"))

    def wake_cache(self) -> None:
        wait(self.group.call("wake_cache"))

    @property
    def engines(self) -> int:
        return len(self.group)

    def join_refit(self, sources: Sequence[Sequence[Source]]) -> Call:
        """Connect each engine's ranks to their producers; ends when the producers have joined, too."""
        return self.group.call_each("join_refit", [(own,) for own in sources])

    def receive_weights(self) -> Call:
        """Receive new weights; ends when the producers have sent them."""
        return self.group.call("receive_weights", phase="refit")


def _require_finite(replica: int, completions: Sequence[Completion]) -> None:
    """Raise EngineError where a sampled token's logprob is not a finite number."""
    for completion in completions:
        for place, logprob in enumerate(completion.logprobs):
            if not math.isfinite(logprob):
                token = completion.tokens[place]
                raise EngineError(
                    f"generation rank {replica} sampled token {token} (number {place + 1} of its response) with the "
                    f"logprob {logprob}: its weights, or what it computes from them, are not finite numbers"
                )


def engine_memory(held: Mapping[str, int], shares_device: bool) -> dict[str, float]:
    """Convert an engine's `memory()` (bytes) to metrics. On a shared device they are the generation phase's components
    and the refit phase's weights, next to the policy's; on a device that the policy does not use, `engine/<what>`."""
    if not shares_device:
        return {f"engine/{name}": float(nbytes) for name, nbytes in held.items()}
    weights = float(held["generation_weights"])
    return {
        "device_bytes/generate": float(held["device"]),
        "measured/generate/generation_weights": weights,
        "measured/generate/kv_cache": float(held["kv_cache"]),
        "measured/refit/generation_weights": weights,
    }
