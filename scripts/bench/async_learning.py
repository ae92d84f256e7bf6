"""What GRPO learns, by where its rollouts come from.

async_learning.py MODEL [--steps 60] [--seeds 1 2 42] [--sources NAME ...] [--together N] [-- OVERRIDE ...]

For each source, one run a seed, all at the same time, of SmolLM2 on chain_sum (the recipe grpo-smollm2-135m-1n1g),
whose engines stay awake on the policy's GPU. `--small`: the quickstart's task on CPUs, one run after the other. The
bar compares means of the last ten steps: of a source's seeds with those of `on policy` (without such runs, with those
that gpu_run.py kept), in units of the latter's standard deviation over the seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record
from async_rate import ONE_STEP_OFF, QUEUE
from series import values
from whole_runs import UNKEPT

SOURCES = {"on policy": [], "one step off": ONE_STEP_OFF, "queue, age 2, in flight": QUEUE}
LAST = 10
Job = tuple[str, int]
TOGETHER = [
    *("recipes=grpo-smollm2-135m-1n1g", "generation.colocated.sleep=false", "logger.plots=false"),
    # Where several engines start on a GPU at the same time, none can measure what is free.
    *("generation.vllm_cfg.gpu_memory_utilization=0.06", "+generation.vllm_kwargs.kv_cache_memory_bytes=3000000000"),
]
SMALL = ["logger.plots=false", "algorithm.val_period=0", "policy.megatron_cfg.optimizer.lr=3e-4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 42])
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--together", type=int, help="runs at a time (default: the seeds of a source)")
    parser.add_argument("--small", action="store_true", help="the quickstart's task, for CPUs")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    own = [*(SMALL if given.small else TOGETHER), *UNKEPT, *given.overrides]
    own += [f"policy.model_name={given.model.resolve()}", f"algorithm.max_num_steps={given.steps}"]
    jobs = {(source, seed): [*own, *SOURCES[source]] for source in given.sources for seed in given.seeds}
    found = run_all(jobs, given.together or (1 if given.small else len(given.seeds)))
    results, means = [], {}
    for source in given.sources:
        runs = [found[source, seed] for seed in given.seeds]
        rewards = [[line["train/reward"] for line in run] for run in runs]
        means[source] = [statistics.mean(of_run[-LAST:]) for of_run in rewards]
        config = f"{source}, seeds {','.join(map(str, given.seeds))}"
        results.append(record.result(f"mean reward of the last {LAST} steps", config, "share", means[source]))
        results.append(record.result("reward of the first step", config, "share", [run[0] for run in rewards]))
        tail = [line for run in runs for line in run[LAST:]]
        for what, name in (
            ("mean age of a token", "train/trajectory_age_mean"),
            ("KL of the engine's logprobs to the policy's", "train/gen_kl_error"),
            ("effective sample size of the correction", "train/correction/ess"),
        ):
            if measured := [line[name] for line in tail if name in line]:
                results.append(record.result(what, config, "", measured))
        print(source, [round(mean, 4) for mean in means[source]], flush=True)
    reference = means.get("on policy") or kept(given.seeds)
    bars = [bar(source, means[source], reference) for source in means if source != "on policy" and len(reference) > 1]
    print(record.write("async-learning", results, bars, f"model: {given.model.name}, {given.steps} steps"))


def bar(source: str, means: list[float], reference: list[float]) -> dict:
    off = abs(statistics.mean(means) - statistics.mean(reference)) / statistics.stdev(reference)
    return record.bar(f"{source}: standard deviations from on policy", off, 1.0, False)


def kept(seeds: list[int]) -> list[float]:
    """The same means of the runs of this recipe that gpu_run.py kept, on policy."""
    runs = (record.FOLDER / "runs" / f"chain-sum-seed{seed}.json" for seed in seeds)
    rewards = [values(json.loads(run.read_text()), "train/reward") for run in runs if run.exists()]
    return [statistics.mean(of_run[-LAST:]) for of_run in rewards]


def run_all(jobs: dict[Job, list[str]], together: int) -> dict[Job, list[dict[str, float]]]:
    """Run the command for each source and seed with its overrides; returns their training steps."""
    with tempfile.TemporaryDirectory() as folder:
        places = {job: Path(folder) / f"run-{number}" for number, job in enumerate(jobs)}
        waiting, running, failed = list(jobs), {}, []
        while waiting or running:
            while waiting and len(running) < together:
                job = waiting.pop(0)
                running[job] = _start(places[job], [*jobs[job], f"algorithm.seed={job[1]}"])
            time.sleep(0.5)
            for job, process in list(running.items()):
                if process.poll() is not None:
                    print(*job, f"ended with status {process.returncode}", flush=True)
                    del running[job]
                    failed += [job] if process.returncode else []
        if failed:
            ends = "\n".join(_log(places[job]).read_text()[-3000:] for job in failed)
            raise SystemExit(f"these runs failed: {failed}\n{ends}")
        return {job: _steps(place) for job, place in places.items()}


def _start(run: Path, overrides: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "nemo_rl_lite.train", *overrides, f"hydra.run.dir={run}"]
    with _log(run).open("w") as log:
        return subprocess.Popen(command, cwd=record.ROOT, stdout=log, stderr=subprocess.STDOUT)


def _log(run: Path) -> Path:
    return run.with_suffix(".log")


def _steps(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/reward" in line]


if __name__ == "__main__":
    main()
