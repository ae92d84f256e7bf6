"""Find the largest model of a family that trains colocated on one GPU, by offload preset.

largest_model.py predict [lora]                     predict how many layers fit; write a record
largest_model.py run PRESET LAYERS TOKENIZER [lora]  try it: a random model, two GRPO steps by runs.py

The family is Qwen3-4B's width with more or fewer layers. With `lora` it is Qwen3-8B's, layers are recomputed, and the
engine applies the adapters itself. The engine gets its weights and `CACHE` for its KV cache.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import random_model
import record
import runs

from nemo_rl_lite.models.shape import ModelShape, model_shape
from nemo_rl_lite.planning.budget import budget
from nemo_rl_lite.planning.memory import engine_weights
from nemo_rl_lite.planning.parameters import parameter_count
from nemo_rl_lite.validation.compose import compose_config

COMMON_LAYERS = 24
GPU_BYTES = int(79.2 * 2**30)
CACHE = 6 * 2**30
PRESETS = ("none", "logprob", "colocated", "pinned", "cpu_optimizer", "activations", "max_memory")
RUN = [
    "recipes=grpo-smollm2-135m-1n1g",
    "policy.sequence_packing.train_mb_tokens=4096",
    "policy.sequence_packing.logprob_mb_tokens=4096",
    "policy.train_global_batch_size=512",
    "generation.vllm_cfg.max_num_seqs=128",
    "refit.bucket_bytes=500000000",
    "algorithm.max_num_steps=2",
    "algorithm.val_at_start=false",
    "algorithm.val_at_end=false",
    "checkpoint.export_hf_at_end=false",
]
LORA = [
    "policy.megatron_cfg.peft.enabled=true",
    "policy.megatron_cfg.activation_checkpointing=true",
    "generation.vllm_cfg.lora=adapters",
]


@dataclass(frozen=True)
class Kind:
    """What is trained: a family of `random_model.py`, the presets that the rules accept, and the names of records."""

    family: str
    presets: tuple[str, ...]
    overrides: tuple[str, ...]
    record: str
    run: str


KINDS = {
    "weights": Kind("qwen3-4b", PRESETS, (), "largest-model-predicted", "largest"),
    "lora": Kind("qwen3-8b", ("none", "pinned"), tuple(LORA), "largest-model-lora-predicted", "lora-largest"),
}


def main(arguments: list[str]) -> None:
    match arguments:
        case ["predict", *kind]:
            write_prediction(KINDS["lora" if kind else "weights"])
        case ["run", preset, layers, tokenizer, *kind]:
            run(KINDS["lora" if kind else "weights"], preset, int(layers), tokenizer)
        case _:
            sys.exit(__doc__)


def write_prediction(kind: Kind) -> None:
    results = []
    for preset in kind.presets:
        layers = largest(kind, preset)
        billions = parameter_count(shape_of(kind, layers)) / 1e9
        results.append(record.result("largest model, predicted", preset, "B parameters", [billions]))
        results.append(record.result("its layers", preset, "", [layers]))
        share = largest_share(kind, preset)
        what = f"largest gpu_memory_utilization with {COMMON_LAYERS} layers"
        results.append(record.result(what, preset, "", [share]))
    print(record.write(kind.record, results, []).read_text())


def largest(kind: Kind, preset: str) -> int:
    """Return the number of layers of the largest model with all phases fitting. A peak grows with the layers."""
    fits, too_many = 1, 256
    while too_many - fits > 1:
        layers = (fits + too_many) // 2
        fits, too_many = (layers, too_many) if peak(kind, preset, layers) <= GPU_BYTES else (fits, layers)
    return fits


def largest_share(kind: Kind, preset: str) -> float:
    """Return the largest share of the GPU for the engine, next to a model that every preset can train."""
    percent = 99
    while percent and peak(kind, preset, COMMON_LAYERS, percent / 100) > GPU_BYTES:
        percent -= 1
    return percent / 100


def peak(kind: Kind, preset: str, layers: int, share: float | None = None) -> int:
    """Return the predicted bytes of the fullest phase, with the refit's buffers, contexts and captured graphs."""
    overrides = [*settings(kind, preset, layers), "policy.model_name=a/model", "checkpoint.save_period=0"]
    overrides += [f"generation.vllm_cfg.gpu_memory_utilization={share}"] if share else []
    config = compose_config(overrides)
    planned = budget(config, shape_of(kind, layers), GPU_BYTES)
    return planned.device[planned.peak_phase]


def settings(kind: Kind, preset: str, layers: int) -> list[str]:
    own = [*RUN, *kind.overrides, f"offload={preset}"]
    weights = engine_weights(compose_config([*own, "policy.model_name=a/model"]), shape_of(kind, layers))
    share = min((weights + CACHE) / GPU_BYTES, 1)
    return [*own, f"generation.vllm_cfg.gpu_memory_utilization={share:.3f}"]


def shape_of(kind: Kind, layers: int) -> ModelShape:
    return model_shape(random_model.model_config(f"{kind.family}:{layers}").to_dict())


def run(kind: Kind, preset: str, layers: int, tokenizer: str) -> None:
    folder = f"models/{kind.family}-{layers}-layers"
    if not Path(folder).exists():
        random_model.main([f"{kind.family}:{layers}", tokenizer, folder])
    overrides = [*settings(kind, preset, layers), f"policy.model_name={folder}"]
    runs.main(["keep", f"{kind.run}-{preset}-{layers}-layers", *overrides])


def trial() -> None:
    """Predict for one preset."""
    write_prediction(replace(KINDS["lora"], presets=("pinned",)))


if __name__ == "__main__":
    record.start(main, trial)
