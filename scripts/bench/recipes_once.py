"""Each named recipe for a few steps: does it run, is its loss finite, how long is a step?

recipes_once.py MODEL [--only NAME ...] [--variants] [--at-once 5] [--small]

The recipes are the files of configs/algorithm/; `--variants` runs other settings of losses and advantages instead. The
record, docs/benchmarks/recipes-once-*.json or recipes-variants-*.json, and a line come as each run ends, and
`--continue RECORD` takes over the runs that a record has. Distillation learns from the model itself. Runs share one
GPU, about 11 GiB each; `--small` is for CPUs.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import record
from learning_tasks import TASKS
from together import Ended, Job, run_together
from whole_runs import STEPS_ALONE

GENERATING = ("grpo", "dapo", "drgrpo", "gspo", "cispo", "sapo", "reinforce_pp", "rloo", "distillation")
SUPERVISED = ("dpo", "orpo", "kto", "sft")
_LOSS = "algorithm.loss_fn"
# Names are those of folders, so that they have no comma, which separates values in an override.
VARIANTS = {
    "distillation-32-logits": ["algorithm=distillation", "algorithm.topk_logits_k=32"],
    "gspo-token": ["algorithm=gspo", f"{_LOSS}.sequence_level_importance_ratios=token"],
    "clip-cov": ["algorithm=grpo", f"{_LOSS}.policy_loss=clip_cov"],
    "kl-cov": ["algorithm=grpo", f"{_LOSS}.policy_loss=kl_cov"],
    "entropy-bonus-and-mask": [
        *("algorithm=grpo", f"{_LOSS}.entropy_coef=0.001", f"{_LOSS}.top_entropy_quantile=0.2"),
    ],
    "reinforce-pp-mean-of-the-step": ["algorithm=reinforce_pp", "algorithm.use_leave_one_out_baseline=batch"],
    "reinforce-pp-kl-in-reward": [
        *("algorithm=reinforce_pp", "algorithm.use_leave_one_out_baseline=batch"),
        *(f"{_LOSS}.use_kl_in_reward=true", f"{_LOSS}.reference_policy_kl_type=k1"),
    ],
    "lite-ppo-and-positive-nll": [
        *("algorithm=grpo", "algorithm.normalize_rewards=batch", f"{_LOSS}.positive_example_nll_weight=0.1"),
    ],
    "ipo": ["algorithm=dpo", "algorithm.preference_loss=ipo"],
    **{
        f"dpo-{name}": ["algorithm=dpo", f"algorithm.preference_loss={name}"]
        for name in ("hinge", "sppo_hard", "nca_pair", "bco_pair", "apo_zero", "apo_down")
    },
    **{
        f"dpo-{name}": ["algorithm=dpo", f"algorithm.preference_loss={name}", "algorithm.label_smoothing=0.1"]
        for name in ("robust", "exo_pair")
    },
    "dpo-js_divergence": ["algorithm=dpo", "algorithm.f_divergence=js_divergence"],
    "rpo": ["algorithm=dpo", "algorithm.sft_loss_weight=1.0", "algorithm.sft_average_log_probs=true"],
    "kto-apo_zero_unpaired": ["algorithm=kto", "algorithm.preference_loss=apo_zero_unpaired"],
}
GPU = ["policy=megatron_gpu", "cluster.gpus_per_node=1", "cluster.threads_per_worker=2"]
ENGINE = [
    *("generation=vllm_gpu", "generation.colocated.sleep=false"),
    # Where several engines start on a GPU at the same time, none can measure what is free.
    *("generation.vllm_cfg.gpu_memory_utilization=0.06", "+generation.vllm_kwargs.kv_cache_memory_bytes=2000000000"),
]
SAMPLES = ["algorithm.num_prompts_per_step=16", "algorithm.num_generations_per_prompt=8"]
FEW_SAMPLES = ["algorithm.num_prompts_per_step=4", "algorithm.num_generations_per_prompt=2"]
# Two optimizer steps a rollout: in the second one, ratios are no longer 1.
BATCH, SMALL_BATCH = ["policy.train_global_batch_size=64"], ["policy.train_global_batch_size=4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variants", action="store_true", help=f"instead of the files: {', '.join(VARIANTS)}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=5, help="runs at a time")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which all runs are interrupted")
    parser.add_argument("--continue", dest="earlier", type=Path, metavar="RECORD", help="a record to continue")
    parser.add_argument("--small", action="store_true", help="batches for CPUs")
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="of every run")
    given = parser.parse_args()
    recipes = VARIANTS if given.variants else {name: [f"algorithm={name}"] for name in (*GENERATING, *SUPERVISED)}
    if unknown := set(given.only or ()) - set(recipes):
        parser.error(f"--only {', '.join(sorted(unknown))}: there is {', '.join(recipes)}")
    runs = {run["name"]: run for run in json.loads(given.earlier.read_text())["runs"]} if given.earlier else {}
    done = {name for name, run in runs.items() if run["status"] == 0}
    todo = {name: own for name, own in recipes.items() if name not in done and name in (given.only or recipes)}

    def keep(ended: Ended) -> None:
        runs[ended.job.name] = run = run_of(ended, given.steps)
        print(line(run), flush=True)
        print(write(list(runs.values()), given), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job(name, [*overrides(own, given), *given.override]) for name, own in todo.items()]
        run_together(jobs, given.at_once, 1, Path(folder), given.limit, keep)
    if wrong := [name for name in todo if name not in runs or not is_right(runs[name])]:
        sys.exit(f"not as they should be: {', '.join(wrong)}")


def overrides(own: list[str], given: argparse.Namespace) -> list[str]:
    """The overrides of the train command for a recipe."""
    name = own[0].removeprefix("algorithm=")
    base = [*own, *STEPS_ALONE, *(SMALL_BATCH if given.small else BATCH), f"policy.model_name={given.model.resolve()}"]
    base += [f"algorithm.max_num_steps={given.steps}", *([] if given.small else GPU)]
    if name in SUPERVISED:
        # Answers and mistakes are generated.
        return [*base, "data=reverse_digits", "policy.max_total_sequence_length=128"]
    teacher = [f"teacher.model_name={given.model.resolve()}"] if name == "distillation" else []
    engine, samples = (["generation=transformers"], FEW_SAMPLES) if given.small else (ENGINE, SAMPLES)
    task = [one for one in TASKS["gcd"].overrides() if not one.startswith("data.validation_fraction=")]
    return [*base, *engine, *samples, *teacher, *task]


def run_of(ended: Ended, steps: int) -> dict[str, Any]:
    """What a run has done: its seconds a step, its losses, and its rewards where it has some."""
    lines = [one for one in ended.lines if "train/loss" in one]
    losses = [one["train/loss"] for one in lines]
    return {
        "name": ended.job.name,
        "status": ended.status,
        "seconds": round(ended.seconds, 1),
        "finite": len(losses) == steps and all(map(math.isfinite, losses)),
        "losses": [f"{loss:.6g}" for loss in losses],
        "rewards": [float(f"{one['train/reward']:.4g}") for one in lines if "train/reward" in one],
        "steps": [float(f"{one['timing/train/total_step_time']:.4g}") for one in lines],
    }


def line(run: dict[str, Any]) -> str:
    """A run in one line."""
    step = f"{statistics.median(run['steps']):.2f} s a step" if run["steps"] else "no step"
    reward = f", rewards {' '.join(map(str, run['rewards']))}" if run["rewards"] else ""
    finite = "finite" if run["finite"] else "NOT FINITE, or too few"
    return (
        f"{run['name']:40} status {run['status']}, {step}, losses {' '.join(run['losses'])} ({finite}){reward}, "
        f"{run['seconds']:.0f} s in all"
    )


def is_right(run: dict[str, Any]) -> bool:
    return run["status"] == 0 and run["finite"]


def write(runs: list[dict[str, Any]], given: argparse.Namespace) -> Path:
    """Write the record of all runs."""
    results = []
    for run in filter(is_right, runs):
        results.append(record.result("step, several runs on the GPU", run["name"], "s", run["steps"]))
        results.append(record.result("loss", run["name"], "", list(map(float, run["losses"]))))
        if run["rewards"]:
            results.append(record.result("reward", run["name"], "share", run["rewards"]))
    bars = [
        record.bar("share of runs with a finite loss in each step", sum(map(is_right, runs)) / len(runs), 1.0, True)
    ]
    bench = "recipes-variants" if given.variants else "recipes-once"
    note = f"model: {given.model.name}; {given.steps} steps each, {given.at_once} runs at a time"
    return record.write(bench, results, bars, note, {"runs": runs})


if __name__ == "__main__":
    main()
