"""SFT, then GRPO, of SmolLM2-135M-Instruct on GSM8K, evaluated by the same command before, between and after.

gsm8k.py MODEL --data FOLDER [--stages before sft between grpo after] [--steps 60] [--small]

FOLDER has train.jsonl and test.jsonl. Models and what was measured stay in `--folder`, so that several calls, with some
of the stages each, make one record: each stage writes docs/benchmarks/learning-gsm8k-*.json with all that there is.
`--continue RECORD` takes over the stages that a record has, where the folder was lost. Both trainings see the train
split alone.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import record
from learning import STAGGER_S, end_with_the_script
from whole_runs import KNOWN_MODEL, model_key, run_in, tried

from nemo_rl_lite.validation.compose import compose_config

STAGES = ("before", "sft", "between", "grpo", "after")
EVALUATED = {"before": "before", "between": "after SFT", "after": "after SFT and GRPO"}
TRAINED = {"sft": "SFT", "grpo": "GRPO after SFT"}
NUMBERS = ("problems", "samples", "sampling", "seed", "avg", "pass_at_k", "mean_length", "truncated_share")
"""Of an evaluation's summary; its paths are this machine's."""
LAST = 10
STEPS_PER_EPOCH = 116
"""Of SFT: 7,466 chats of the train split fit, 64 a step."""
KEPT = ["logger.plots=false", "checkpoint.save_period=0", "algorithm.val_at_start=false", "algorithm.val_at_end=false"]
GPU = {
    "sft": ["recipes=sft-smollm2-135m-1n1g-gsm8k", "policy.megatron_cfg.optimizer.lr=2.0e-4"],
    # More responses to a question than the recipe has: few are right, and a question without one teaches nothing.
    "grpo": [
        *("recipes=grpo-smollm2-135m-1n1g-gsm8k", "algorithm.num_prompts_per_step=32"),
        *("algorithm.num_generations_per_prompt=16", "policy.train_global_batch_size=256"),
        *("algorithm.loss_fn.reference_policy_kl_penalty=0.0", "policy.megatron_cfg.optimizer.lr=1.0e-5"),
    ],
    "evaluate": [
        *("generation=vllm_gpu", "policy.precision=bfloat16"),
        # Two engines start on the GPU at the same time, so that neither can measure what is free.
        *(
            "generation.vllm_cfg.gpu_memory_utilization=0.2",
            "+generation.vllm_kwargs.kv_cache_memory_bytes=10000000000",
        ),
    ],
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder of train.jsonl and test.jsonl")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--folder", type=Path, default=record.ROOT / "outputs" / "gsm8k")
    parser.add_argument("--epochs", type=int, default=3, help="of SFT")
    parser.add_argument("--sft-steps", type=int, default=None, help="optimizer steps of SFT, where fewer than that")
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    parser.add_argument("--problems", type=int, default=400, help="test problems that are asked --samples times each")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--greedy-problems", type=int, default=1319, help="test problems that are asked once, greedy")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--continue", dest="earlier", type=Path, metavar="RECORD", help="a record to continue")
    parser.add_argument("--sft-override", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--grpo-override", nargs="+", default=[], metavar="KEY=VALUE")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(given.earlier.read_text())["stages"] if given.earlier else {}
    for stage, found in earlier.items():
        _keep(given, stage, found)
    for stage in given.stages:
        found = _evaluate(given, stage) if stage in EVALUATED else _train(given, stage)
        _keep(given, stage, found)
        print(stage, {name: value for name, value in found.items() if name != "rewards"}, flush=True)
        print(_write(given), flush=True)


def _keep(given: argparse.Namespace, stage: str, found: dict[str, Any]) -> None:
    (given.folder / f"{stage}.json").write_text(json.dumps(found) + "\n")


def _train(given: argparse.Namespace, stage: str) -> dict[str, Any]:
    """Train by the stage's method; returns its seconds and, of GRPO, the mean reward of each step."""
    run = given.folder / f"{stage}-run"
    shutil.rmtree(run, ignore_errors=True)
    own = {
        "sft": [
            *(f"algorithm.max_num_epochs={given.epochs}", model_key(given.model)),
            *(f"algorithm.max_num_steps={given.sft_steps or 'null'}", *given.sft_override),
            f"policy.megatron_cfg.scheduler.lr_decay_iters={STEPS_PER_EPOCH * given.epochs}",
            *(f"data.validation_path={_file(given, 'test')}", "algorithm.val_at_end=true"),
        ],
        "grpo": [
            *(f"policy.model_name={(given.folder / 'sft-run' / 'hf').resolve()}",),
            *(f"algorithm.max_num_steps={given.steps}", *given.grpo_override),
        ],
    }[stage]
    data = ["data.name=file", f"data.train_path={_file(given, 'train')}"]
    overrides = [*GPU[stage], *KEPT, *data, f"algorithm.seed={given.seed}", *own]
    began = time.monotonic()
    rewards = [line["train/reward"] for line in run_in(run, overrides) if "train/reward" in line]
    seconds = round(time.monotonic() - began, 1)
    return {"seconds": seconds, "rewards": [float(f"{one:.5g}") for one in rewards]}


def _evaluate(given: argparse.Namespace, stage: str) -> dict[str, Any]:
    """Ask the stage's model the first test problems several times at temperature 1, and more of them once, greedy."""
    model = {
        "before": given.model,
        "between": given.folder / "sft-run" / "hf",
        "after": given.folder / "grpo-run" / "hf",
    }
    keys = [
        *("data=gsm8k", "data.name=file", f"data.validation_path={_file(given, 'test')}", "data.too_long=drop"),
        *("reward=last_number", "generation.max_new_tokens=300", "policy.max_total_sequence_length=640"),
        *GPU["evaluate"],
    ]
    asked = {
        "sampled": ["--samples", str(given.samples), "--problems", str(given.problems)],
        "greedy": ["--temperature", "0", "--problems", str(given.greedy_problems)],
    }
    outputs = {what: given.folder / f"{stage}-{what}" for what in asked}
    for output in outputs.values():
        shutil.rmtree(output, ignore_errors=True)
    base = ["nemo_rl_lite.evaluate", str(model[stage]), *keys]
    seconds = _commands(*([*base, *asked[what], "--output", str(outputs[what])] for what in asked))
    summaries = {what: json.loads((output / "summary.json").read_text()) for what, output in outputs.items()}
    found = {what: {name: summary[name] for name in NUMBERS} for what, summary in summaries.items()}
    return found | {"seconds": seconds}


def _file(given: argparse.Namespace, split: str) -> Path:
    return given.data.resolve() / f"{split}.jsonl"


def _commands(*modules: list[str]) -> float:
    """Run modules of the package at the same time; returns the seconds until all have ended."""
    began, running = time.monotonic(), list[subprocess.Popen]()
    for module in modules:
        time.sleep(STAGGER_S if running else 0)
        command = [sys.executable, "-m", *module]
        running.append(subprocess.Popen(command, cwd=record.ROOT, preexec_fn=end_with_the_script))
    statuses = [one.wait() for one in running]
    if any(statuses):
        sys.exit(f"{' and '.join(module[0] for module in modules)} ended with status {statuses}")
    return round(time.monotonic() - began, 1)


def _write(given: argparse.Namespace) -> Path:
    """Write the record of all stages of which the folder has results."""
    found = {
        stage: json.loads(file.read_text()) for stage in STAGES if (file := given.folder / f"{stage}.json").exists()
    }
    results = []
    for stage, setting in EVALUATED.items():
        results += _accuracies(found[stage], setting) if stage in found else []
    for stage, setting in TRAINED.items():
        if stage in found:
            results.append(record.result("end to end", setting, "s", [found[stage]["seconds"]]))
    if rewards := found.get("grpo", {}).get("rewards"):
        for what, part in (("first", rewards[:LAST]), ("last", rewards[-LAST:])):
            mean = sum(part) / len(part)
            results.append(
                record.result(f"mean training reward, {what} {LAST} steps", TRAINED["grpo"], "share", [mean])
            )
    note = f"model: {given.model.name}; seed {given.seed}. Intervals, in the record, are 95 % over problems."
    return record.write("learning-gsm8k", results, [], note, {"stages": found})


def _accuracies(found: dict[str, Any], setting: str) -> list[dict[str, Any]]:
    sampled, greedy = found["sampled"], found["greedy"]
    samples, problems = sampled["samples"], sampled["problems"]
    numbers = {
        f"avg@{samples} on {problems} test questions, temperature 1": sampled["avg"],
        f"pass@{samples} on {problems} test questions, temperature 1": sampled["pass_at_k"][str(samples)],
        f"accuracy on {greedy['problems']} test questions, greedy": greedy["avg"],
    }
    results = []
    for name, one in numbers.items():
        results.append(record.result(name, setting, "share", [one["value"]]) | {"interval": [one["low"], one["high"]]})
    results.append(record.result("length of a response", setting, "tokens", [sampled["mean_length"]]))
    return results


def trial() -> None:
    """Compose both trainings and all evaluations; the trainings' steps are a tiny run's, the answers are made up."""

    def answer(*modules: list[str]) -> float:
        for _, _, *rest in modules:
            keys = [*(one for one in rest if "=" in one), f"data.train_path={folder}/train.jsonl"]
            compose_config([*keys, "cluster.gpus_per_node=1", f"policy.model_name={KNOWN_MODEL}"])
            samples = int(rest[rest.index("--samples") + 1]) if "--samples" in rest else 1
            value = {"value": 0.5, "low": 0.25, "high": 0.75}
            summary = dict.fromkeys(NUMBERS, 0) | {"samples": samples, "problems": 2, "avg": value}
            output = Path(rest[rest.index("--output") + 1])
            output.mkdir()
            summary = summary | {"pass_at_k": {str(samples): value}, "mean_length": 8.0}
            (output / "summary.json").write_text(json.dumps(summary))
        return 1.0

    with tempfile.TemporaryDirectory() as folder, tried(), patch.object(sys.modules[__name__], "_commands", answer):
        for split in ("train", "test"):
            (Path(folder) / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 64)
        own = ["--grpo-override", "policy.max_total_sequence_length=128", "generation.max_new_tokens=64"]
        main([KNOWN_MODEL, "--data", folder, "--folder", str(Path(folder) / "kept"), "--steps", "8", *own])


if __name__ == "__main__":
    record.start(main, trial)
