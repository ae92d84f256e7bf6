"""What SmolLM2-135M-Instruct learns on tasks at the edge of what it can do, by the algorithm.

learning.py explore MODEL TASK ...                  short runs of GRPO, a line for each task as its run ends
learning.py compare MODEL TASK [--algorithms ...] [--seeds 1 2 3]       writes docs/benchmarks/learning-TASK-*.json

Runs share GPUs: `--at-once` on each of `--gpus`. A run takes about 11 GiB of GPU memory and two cores. `compare` writes
the record as each run ends; `--continue RECORD` takes over the runs that a record has, so that several calls make one
record, and `--only grpo:1 dapo:2` names some runs. Runs that last longer than `--limit` seconds are interrupted: they
are in the record with what they had measured, and are run again by a call that continues. `--small` is for CPUs.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import learning_record
from learning_tasks import TASKS
from together import Ended, Job, run_together

ALGORITHMS = ("grpo", "dapo", "drgrpo", "cispo", "gspo")
EVERYWHERE = [
    *("logger.plots=false", "logger.show_samples_period=0", "checkpoint.save_period=0"),
    *("checkpoint.export_hf_at_end=false", "algorithm.val_temperature=0"),
    # No penalty for any of them: only GRPO's file has one.
    *("algorithm.loss_fn.reference_policy_kl_penalty=0.0", "policy.megatron_cfg.optimizer.lr=1.0e-5"),
]
SHARED_GPU = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1", "cluster.threads_per_worker=2"),
    *("algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"),
    # Four optimizer steps a rollout: the algorithms differ in the later ones, where the ratio is no longer 1.
    *("policy.train_global_batch_size=128", "policy.sequence_packing.train_mb_tokens=6144"),
    "generation.colocated.sleep=false",
    # Where several engines start on a GPU at the same time, none can measure what is free.
    *("generation.vllm_cfg.gpu_memory_utilization=0.06", "+generation.vllm_kwargs.kv_cache_memory_bytes=2000000000"),
]
SMALL = [
    "generation=transformers",
    *("algorithm.num_prompts_per_step=4", "algorithm.num_generations_per_prompt=4", "cluster.threads_per_worker=1"),
    *("policy.train_global_batch_size=8", "policy.train_micro_batch_size=8"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("explore", "compare"))
    parser.add_argument("model", type=Path)
    parser.add_argument("tasks", nargs="+", metavar="TASK", choices=list(TASKS), help=", ".join(TASKS))
    parser.add_argument("--algorithms", nargs="+", default=None, choices=ALGORITHMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--val-period", type=int, default=10, help="steps between validations")
    parser.add_argument("--problems", type=int, default=300, help="most held-out problems of a validation")
    parser.add_argument("--at-once", type=int, default=6, help="runs at a time on a GPU")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which all runs are interrupted")
    parser.add_argument("--only", nargs="+", metavar="ALGORITHM:SEED", help="only these runs")
    parser.add_argument("--continue", dest="earlier", type=Path, metavar="RECORD", help="a record to continue")
    parser.add_argument("--small", action="store_true", help="batches for CPUs")
    parser.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="of every run")
    given = parser.parse_args()
    (explore if given.what == "explore" else compare)(given)


def explore(given: argparse.Namespace) -> None:
    """Print what each task begins and ends with, as its runs end."""
    runs = [
        (task, name, seed)
        for seed in given.seeds or [1]
        for name in given.algorithms or ["grpo"]
        for task in given.tasks
    ]

    def show(ended: Ended) -> None:
        print(learning_record.line(ended.job.name, learning_record.run_of(ended)), flush=True)

    _run(given, {"-".join(map(str, run)): run for run in runs}, show)


def compare(given: argparse.Namespace) -> None:
    """Run every algorithm with every seed on the task, and keep the runs in the record as they end."""
    if len(given.tasks) > 1:
        sys.exit("compare takes one task: a record is of one")
    task = given.tasks[0]
    kept = learning_record.earlier(given.earlier) if given.earlier else []
    done = {(run["algorithm"], run["seed"]) for run in kept if run["finished"]}
    wanted = [(name, seed) for seed in given.seeds or [1, 2, 3] for name in given.algorithms or ALGORITHMS]
    if given.only:
        wanted = [(name, seed) for name, seed in wanted if f"{name}:{seed}" in given.only]
    todo = {f"{task}-{name}-{seed}": (task, name, seed) for name, seed in wanted if (name, seed) not in done}
    runs = {(run["algorithm"], run["seed"]): run for run in kept}

    def keep(ended: Ended) -> None:
        _, name, seed = todo[ended.job.name]
        one = {"algorithm": name, "seed": seed} | learning_record.run_of(ended)
        print(learning_record.line(ended.job.name, one), flush=True)
        if one["validation"]:
            runs[name, seed] = one
            print(learning_record.write(task, given, list(runs.values())), flush=True)

    if kept:
        print(learning_record.write(task, given, kept), flush=True)
    print(f"{len(todo)} runs to do, {len(done)} done before", flush=True)
    _run(given, todo, keep)


def _run(given: argparse.Namespace, runs: dict[str, tuple[str, str, int]], report: Any) -> None:
    own = [
        *((*SMALL, *EVERYWHERE) if given.small else (*SHARED_GPU, *EVERYWHERE)),
        *(f"policy.model_name={given.model.resolve()}", f"algorithm.max_num_steps={given.steps}"),
        *(f"algorithm.val_period={given.val_period}", f"algorithm.max_val_samples={given.problems}"),
    ]
    jobs = [
        Job(job, [*own, *TASKS[task].overrides(), f"algorithm={name}", f"algorithm.seed={seed}", *given.override])
        for job, (task, name, seed) in runs.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        run_together(jobs, given.at_once, given.gpus, Path(folder), given.limit, report)


if __name__ == "__main__":
    main()
