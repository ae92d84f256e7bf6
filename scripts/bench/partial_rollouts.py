"""Compare what synchronous, partial and one-step-off rollouts learn on the default task, with the same seeds.

partial_rollouts.py [--seeds 8] [--cores CORES] [--ways WAY ...] [--rate RATE]

Runs at the same time have CORES cores each (default: one run with all). They take 60 steps, with a held-out accuracy
after every 10.
"""

import argparse
import math
import os
import queue
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import batched, product
from pathlib import Path

import record
from whole_runs import KNOWN_MODEL, run_in, tried

STEPS, PERIOD = 60, 10
COMMON = [
    *(f"algorithm.max_num_steps={STEPS}", f"algorithm.val_period={PERIOD}", "algorithm.val_at_start=false"),
    *("logger.plots=false", "checkpoint.save_period=0", "checkpoint.export_hf_at_end=false"),
]
SYNCHRONOUS = "synchronous"
WAYS = {SYNCHRONOUS: [], "partial rollouts": ["async=partial"], "one step off": ["async=one_step_off"]}
ACCURACY, AGE, STEP = "validation/accuracy", "train/trajectory_age_mean", "timing/train/total_step_time"
ACCURACIES: dict[str, Callable[[list[dict[str, float]]], float]] = {
    "mean held-out accuracy": lambda steps: mean(steps, ACCURACY),
    "held-out accuracy at the end": lambda steps: steps[-1][ACCURACY],
}
# Largest loss of held-out accuracy that counts as equal.
LOSS = 0.05


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="the number of seeds, at least 2")
    parser.add_argument("--cores", type=int, help="cores of each run")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="compared with synchronous rollouts")
    parser.add_argument("--rate", help="learning rate, such as 1e-4 (default: the task's)")
    given = parser.parse_args(arguments)
    if given.seeds < 2:
        parser.error("--seeds: an interval needs two")
    own = sorted(os.sched_getaffinity(0))
    if given.cores is not None and not 0 < given.cores <= len(own):
        parser.error(f"--cores: there are {len(own)}")
    places = [place for place in batched(own, given.cores or len(own)) if len(place) == (given.cores or len(own))]
    name, overrides = "partial-rollouts", list[str]()
    if given.rate is not None:
        name, overrides = f"{name}-rate-{given.rate}", [f"policy.megatron_cfg.optimizer.lr={given.rate}"]
    write(given.seeds, [SYNCHRONOUS, *(way for way in given.ways if way != SYNCHRONOUS)], places, overrides, name)


def write(
    seeds: int, ways: list[str], places: list[tuple[int, ...]], own: list[str], name: str = "partial-rollouts"
) -> Path:
    """Run each seed in all ways, one run on the cores of each place at a time, and write the record."""
    free = queue.SimpleQueue[tuple[int, ...]]()
    for place in places:
        free.put(place)

    def run(of: tuple[int, str]) -> list[dict[str, float]]:
        seed, way = of
        place = free.get()
        # Of this thread, and of the processes that it starts.
        os.sched_setaffinity(0, place)
        try:
            with tempfile.TemporaryDirectory() as folder:
                steps = run_in(Path(folder) / "run", [*COMMON, *WAYS[way], *own, f"algorithm.seed={seed}"])
        finally:
            free.put(place)
        print(f"seed {seed}, {way}: {mean(steps, ACCURACY):.3f}, staleness {mean(steps, AGE):.2f}", flush=True)
        return steps

    each = list(product(range(1, seeds + 1), ways))
    with ThreadPoolExecutor(len(places)) as pool:
        runs = dict(zip(each, pool.map(run, each), strict=True))
    results, bars, intervals = [], [], {}
    for way in ways:
        config, ran = f"{way}, seeds 1 to {seeds}", [runs[seed, way] for seed in range(1, seeds + 1)]
        results += [
            *(record.result(name, config, "share", list(map(of, ran))) for name, of in ACCURACIES.items()),
            record.result("mean staleness", config, "steps", [mean(steps, AGE) for steps in ran]),
            record.result("step time (median of a run)", config, "s", [median(steps, STEP) for steps in ran]),
        ]
        for quantity, of in ACCURACIES.items() if way != SYNCHRONOUS else ():
            gains = [of(steps) - of(runs[seed, SYNCHRONOUS]) for seed, steps in enumerate(ran, 1)]
            half = quantile(seeds - 1) * statistics.stdev(gains) / math.sqrt(seeds)
            low, high = statistics.fmean(gains) - half, statistics.fmean(gains) + half
            results.append(record.result(f"gain in {quantity}", config, "share", gains))
            bars.append(record.bar(f"{way}: lower end of the interval, {quantity}", low, -LOSS, at_least=True))
            intervals[f"{way}, {quantity}"] = [low, high]
            print(f"{way}, gain in {quantity}: {statistics.fmean(gains):.3f}, 95 % interval {low:.3f} to {high:.3f}")
    return record.write(name, results, bars, more={"intervals": intervals, "cores of a run": len(places[0])})


def mean(steps: list[dict[str, float]], metric: str) -> float:
    return statistics.fmean(step[metric] for step in steps if metric in step)


def median(steps: list[dict[str, float]], metric: str) -> float:
    return statistics.median(step[metric] for step in steps if metric in step)


def quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile, by the first terms of its expansion from the normal one (0.4 % too small with
    7 degrees of freedom)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def trial() -> None:
    """Compose the runs, and write the record of a tiny one."""
    with tried():
        print(write(2, [*WAYS], [tuple(sorted(os.sched_getaffinity(0)))], [f"policy.model_name={KNOWN_MODEL}"]))


if __name__ == "__main__":
    record.start(main, trial)
