"""Generation engines in Ray actors: replicas share the prompts."""

from dataclasses import replace
from itertools import pairwise

from nemo_rl_lite.cluster.workers import WorkerGroup, wait
from nemo_rl_lite.generation.interface import Completion, Sampling

ENGINE_CLASSES = {
    "vllm": "nemo_rl_lite.generation.vllm.worker.VLLMEngine",
    "transformers": "nemo_rl_lite.generation.transformers.TransformersEngine",
}


class RemoteGeneration:
    """`Generation` over a group of started engines."""

    def __init__(self, group: WorkerGroup):
        self.group = group

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """Prompts are split into contiguous shares; each replica samples with a seed of its own."""
        count = len(self.group)
        bounds = [len(prompts) * replica // count for replica in range(count + 1)]
        shares = [
            (prompts[start:stop], replace(sampling, seed=sampling.seed * count + replica))
            for replica, (start, stop) in enumerate(pairwise(bounds))
        ]
        return [completion for share in wait(self.group.call_each("generate", shares)) for completion in share]

    def finish_generation(self) -> dict[str, float]:
        """Engines that share a GPU with the policy fall asleep; metrics of what their devices held before."""
        used = max(wait(self.group.call("device_bytes")))
        wait(self.group.call("sleep"))
        return {"device_bytes/generate": float(used)} if used else {}

    def wake_weights(self) -> None:
        wait(self.group.call("wake_weights"))

    def wake_cache(self) -> None:
        wait(self.group.call("wake_cache"))
