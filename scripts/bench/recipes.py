"""Run recipes of large models on the GPUs of this machine: three steps with random weights.

recipes.py run TOKENIZER MODELS NAME ...

Runs these recipes. TOKENIZER is a model's folder. Random models are written to the folder MODELS and kept.

recipes.py plan GPUS

Prints how each recipe runs on this number of GPUs, and what `nrl-lite plan` says.

A recipe keeps its algorithm, precision, offload preset and length limit. Layers, parallel sizes, prompts of a step and
new tokens are reduced to what these GPUs hold. Prompts, chats and pairs are random words. The reward accepts responses
that end with a vowel.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import random_model
import record
from transformers import AutoTokenizer
from whole_runs import PHASES, STEPS_ALONE, WORDS, results_of, run_in, steps_of, tiny_model, tiny_run

MEGATRON = "policy.megatron_cfg"
STEPS = 3
GRPO = [
    *("algorithm.num_prompts_per_step=8", "algorithm.num_generations_per_prompt=8", "generation.max_new_tokens=512"),
    *("policy.train_global_batch_size=64", "reward=format", "reward.kwargs.pattern='.*[aeiou]'"),
]
ROWS = ["policy.train_global_batch_size=32", "algorithm.max_num_epochs=null"]
MEMORY = [
    ("GPU in use while generating", "GiB", "memory/device_bytes/generate", 2**30),
    ("policy's peak in training", "GiB", "memory/policy_peak_bytes/train", 2**30),
    ("MFU of training", "share", "performance/train_fp_utilization", 1.0),
]


@dataclass(frozen=True)
class Case:
    """The shape in `random_model.py`, and by number of GPUs the layers (None: all) and overrides."""

    shape: str
    on: dict[int, tuple[int | None, list[str]]]
    common: list[str] = field(default_factory=lambda: GRPO)
    teacher: str | None = None


def tensor(size: int) -> str:
    return f"{MEGATRON}.tensor_model_parallel_size={size}"


def pipeline(size: int) -> str:
    return f"{MEGATRON}.pipeline_model_parallel_size={size}"


def experts(size: int) -> list[str]:
    return [f"{MEGATRON}.expert_model_parallel_size={size}", f"generation.vllm_cfg.tensor_parallel_size={size}"]


def engines(gpus: int) -> list[str]:
    resources = "generation.colocated.resources"
    return [f"{resources}.num_nodes=null", f"{resources}.gpus_per_node={gpus}"]


WHOLE: dict[int, tuple[int | None, list[str]]] = {gpus: (None, []) for gpus in (1, 2, 4)}
PP2: dict[int, tuple[int | None, list[str]]] = {2: (16, []), 4: (None, [])}
TP2 = {1: (12, [tensor(1)])} | PP2
STAGES = [f"{MEGATRON}.num_layers_in_{place}_pipeline_stage=null" for place in ("first", "last")]
ONE_CONTEXT = [*STAGES, f"{MEGATRON}.context_parallel_size=1"]
CASES = {
    "grpo-qwen2.5-0.5b-1n1g": Case("qwen2.5-0.5b", {1: (None, [])}),
    "grpo-qwen2.5-1.5b-1n8g": Case("qwen2.5-1.5b", WHOLE),
    "grpo-qwen3-8b-1n1g-lora": Case("qwen3-8b", {1: (None, [])}),
    "grpo-qwen3-8b-1n8g-tp2": Case("qwen3-8b", TP2),
    "grpo-llama3.1-8b-1n8g-tp2": Case("llama3.1-8b", TP2),
    "grpo-llama3.1-8b-1n8g-pp2": Case("llama3.1-8b", PP2),
    "grpo-qwen3-8b-2n8g-noncolocated": Case("qwen3-8b", {2: (8, [tensor(1), *engines(1)]), 4: (16, engines(2))}),
    "grpo-qwen3-30b-a3b-2n8g-ep8": Case(
        "qwen3-30b-a3b", {1: (4, [tensor(1), *experts(1)]), 2: (6, experts(2)), 4: (12, experts(4))}
    ),
    "grpo-qwen3-235b-a22b-16n8g-ep16": Case(
        "qwen3-235b-a22b",
        {
            1: (1, [pipeline(1), tensor(1), *experts(1), *ONE_CONTEXT]),
            2: (2, [pipeline(1), *experts(2), *ONE_CONTEXT]),
            4: (4, [pipeline(2), *experts(2), *ONE_CONTEXT]),
        },
    ),
    "distillation-qwen3-32b-to-4b-1n8g": Case(
        "qwen3-4b",
        {
            1: (18, ["teacher.megatron_cfg.tensor_model_parallel_size=1"]),
            2: (None, ["teacher.megatron_cfg.tensor_model_parallel_size=2"]),
            4: (None, []),
        },
        teacher="qwen3-32b:16",
    ),
    "dpo-qwen3-8b-1n8g-tp2": Case("qwen3-8b", TP2, ROWS),
    "sft-qwen3-8b-1n8g-lora": Case("qwen3-8b", WHOLE, ROWS),
}


def main(arguments: list[str]) -> None:
    match arguments:
        case ["plan", gpus]:
            for name, case in CASES.items():
                if int(gpus) in case.on:
                    planned(name, int(gpus))
        case ["run", tokenizer, models, *names] if names and set(names) <= set(CASES):
            gpus = len(record.describe_hardware().get("gpus", []))
            for name in names:
                print(run(name, gpus, Path(tokenizer), Path(models)), flush=True)
        case _:
            sys.exit(f"{__doc__}\nNAME: {', '.join(CASES)}")


def settings(name: str, gpus: int, model: str, teacher: str) -> list[str]:
    """Return the overrides of a recipe on a number of GPUs. Raises SystemExit: it does not run on that number."""
    case = CASES[name]
    if gpus not in case.on:
        sys.exit(f"{name} is run on {' or '.join(map(str, case.on))} GPUs, not {gpus}")
    own = [f"recipes={name}", "cluster.num_nodes=1", f"cluster.gpus_per_node={gpus}", f"policy.model_name={model}"]
    own += [f"teacher.model_name={teacher}"] if case.teacher else []
    steps = [f"algorithm.max_num_steps={STEPS}", "data.validation_split=null", "data.validation_fraction=0"]
    return [*own, *case.common, *case.on[gpus][1], *STEPS_ALONE, *steps]


def of_file(rows: Path) -> list[str]:
    return ["data.name=file", f"data.train_path={rows}", "data.path=null"]


def planned(name: str, gpus: int) -> None:
    """Print the layers of a recipe's model on a number of GPUs, and what `nrl-lite plan` says."""
    print(f"== {name}: {shape(CASES[name], CASES[name].on[gpus][0])} on {gpus} GPUs", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        overrides = settings(name, gpus, *without_weights(name, gpus, Path(folder)))
        subprocess.run([sys.executable, "-m", "nemo_rl_lite.plan", *overrides, "--gpu", "H200"], cwd=record.ROOT)


def without_weights(name: str, gpus: int, folder: Path) -> tuple[str, str]:
    """Write the model and the teacher of a recipe, as far as a plan reads them."""
    case, found = CASES[name], []
    for model in (shape(case, case.on[gpus][0]), case.teacher or case.shape):
        target = folder / model.replace(":", "-")
        random_model.model_config(model).save_pretrained(target)
        AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(target)
        (target / "model.safetensors").touch()
        found.append(str(target))
    return found[0], found[1]


def shape(case: Case, layers: int | None) -> str:
    return case.shape if layers is None else f"{case.shape}:{layers}"


def run(name: str, gpus: int, tokenizer: Path, models: Path) -> Path:
    """Run a recipe and write its record."""
    case = CASES[name]
    model = written(shape(case, case.on[gpus][0]), tokenizer, models)
    teacher = written(case.teacher, tokenizer, models) if case.teacher else model
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows(name.partition("-")[0])))
        overrides = [*settings(name, gpus, str(model), str(teacher)), *of_file(file)]
        return kept(name, gpus, overrides, run_in(Path(folder) / "run", overrides))


def kept(name: str, gpus: int, overrides: list[str], steps: list[dict[str, float]]) -> Path:
    """Write the record of a run's steps, of which the first warms up."""
    case = CASES[name]
    config = f"{shape(case, case.on[gpus][0])}, {gpus} GPUs"
    more: dict[str, Any] = {"overrides": [one for one in overrides if "/" not in one]}
    return record.write(f"recipe-{name}", results_of(steps[1:], config, [*PHASES, *MEMORY]), [], "random weights", more)


def written(model: str, tokenizer: Path, models: Path) -> Path:
    """Write a model with random weights, unless the folder has it."""
    target = models / model.replace(":", "-")
    if not (target / "config.json").is_file():
        random_model.main([model, str(tokenizer), str(target)])
    return target.resolve()


def rows(kind: str) -> Iterator[dict[str, Any]]:
    """Yield 512 rows for an algorithm: chats, pairs, or problems."""
    chosen = random.Random(0)

    def words(most: int) -> str:
        return " ".join(chosen.choices(WORDS, k=chosen.randint(most // 4, most)))

    for _ in range(512):
        if kind == "sft":
            turns = [("user", 100), ("assistant", 400), ("user", 50), ("assistant", 400)]
            yield {"messages": [{"role": role, "content": words(most)} for role, most in turns]}
        elif kind == "dpo":
            yield {"prompt": words(100), "chosen": words(400), "rejected": words(400)}
        else:
            yield {"question": words(150), "answer": f"#### {chosen.randint(1, 99)}"}


def trial() -> None:
    """Make the rows, compose each recipe on each number of GPUs, and write a record."""
    from nemo_rl_lite.validation.compose import compose_config

    overrides = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        for name, case in CASES.items():
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows(name.partition("-")[0])))
            for gpus in case.on:
                overrides = [*settings(name, gpus, *without_weights(name, gpus, Path(folder))), *of_file(file)]
                compose_config(overrides)
    print(kept("sft-qwen3-8b-1n8g-lora", 4, overrides, steps_of(tiny_run())))


if __name__ == "__main__":
    record.start(main, trial)
