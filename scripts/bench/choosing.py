"""Find a parallel layout and an offload preset for common models: choosing.py writes a record.

The script plans GRPO on sequences of 4,096 tokens and GPUs of 80 GB. It takes the first layout that fits: small
parallel sizes before large ones, cheap presets before expensive ones.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import record

from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.planning.automatic import resolve_auto
from nemo_rl_lite.planning.budget import Budget, budget
from nemo_rl_lite.validation.compose import compose_config

GPU_BYTES = int(79.2 * 2**30)
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
LARGE_MODELS = ("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B-Instruct")
COUNTS = (1, 2, 8, 16)
PRESETS = ("auto", "pinned", "cpu_optimizer", "max_memory")
TASK = [
    "recipes=grpo-smollm2-135m-1n1g",
    "policy.max_total_sequence_length=4096",
    "generation.max_new_tokens=3072",
    "algorithm.num_prompts_per_step=64",
    "algorithm.num_generations_per_prompt=16",
    "policy.train_global_batch_size=512",
]
LORA = ["policy.megatron_cfg.peft.enabled=true", "generation.vllm_cfg.lora=adapters"]


@dataclass(frozen=True)
class Layout:
    tensor: int
    pipeline: int
    expert: int
    preset: str

    def overrides(self, gpus: int) -> list[str]:
        megatron = "policy.megatron_cfg"
        return [
            f"cluster.num_nodes={max(gpus // 8, 1)}",
            f"cluster.gpus_per_node={min(gpus, 8)}",
            f"{megatron}.tensor_model_parallel_size={self.tensor}",
            f"{megatron}.pipeline_model_parallel_size={self.pipeline}",
            f"{megatron}.expert_model_parallel_size={self.expert}",
            f"{megatron}.sequence_parallel={str(self.tensor > 1).lower()}",
            f"generation.vllm_cfg.tensor_parallel_size={self.tensor}",
            f"offload={self.preset}",
        ]

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline, "EP": self.expert}
        split = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["no split"]
        return ", ".join([*split, *([f"`{self.preset}`"] if self.preset != "auto" else [])])


def main(arguments: list[str]) -> None:
    if arguments:
        sys.exit(__doc__)
    write([*MODELS, *LARGE_MODELS], COUNTS)


def write(models: list[str], counts: tuple[int, ...]) -> None:
    results, layouts = [], {}
    for model in models:
        for trained, overrides in (("full", []), ("LoRA", LORA)):
            for gpus in counts:
                setting = f"{model.split('/')[1]}, {trained}, {gpus} GPUs"
                found = first_that_fits(model, gpus, overrides)
                layouts[setting] = str(found[0]) if found else "-"
                if found:
                    peak = found[1].device[found[1].peak_phase] / 2**30
                    results.append(record.result("peak of a GPU", setting, "GiB", [peak]))
                    results.append(record.result("host memory of a node", setting, "GiB", [found[1].host / 2**30]))
                print(setting, layouts[setting], flush=True)
    record.write("choosing-predicted", results, [], more={"layouts": layouts}, machine=False)


def first_that_fits(model: str, gpus: int, overrides: list[str]) -> tuple[Layout, Budget] | None:
    """Return the first layout whose phases all fit, with its budget; None if there is none."""
    shape = find_shape(model)
    for layout in layouts(gpus, bool(shape.experts)):
        try:
            config = compose_config([*TASK, f"policy.model_name={model}", *layout.overrides(gpus), *overrides])
        except ConfigError:
            continue
        planned = budget(resolve_auto(config, shape, GPU_BYTES).config, shape, GPU_BYTES)
        if planned.fits_device:
            return layout, planned
    return None


def layouts(gpus: int, has_experts: bool) -> Iterator[Layout]:
    """Yield layouts in the order of preference."""
    node = min(gpus, 8)
    experts = [size for size in (8, 4, 2) if size <= node] if has_experts else [1]
    for preset in PRESETS:
        for pipeline in (1, 2, 4):
            for tensor in (1, 2, 4, 8):
                for expert in experts or [1]:
                    if tensor <= node and tensor * pipeline <= gpus:
                        yield Layout(tensor, pipeline, expert, preset)


def trial() -> None:
    write(["Qwen/Qwen3-0.6B"], (1,))


if __name__ == "__main__":
    record.start(main, trial)
