"""Compare what synchronous and partial rollouts learn on the default task, with the same seeds.

python scripts/bench/partial_rollouts.py [seed ...]
"""

import math
import statistics
import tempfile
from pathlib import Path

import record
from whole_runs import KNOWN_MODEL, run_in, tried

SEEDS = tuple(range(1, 9))
STEPS = 60
# Student's 97.5 % quantile with seven degrees of freedom, those of eight pairs.
QUANTILE = 2.36
COMMON = [
    *(f"algorithm.max_num_steps={STEPS}", "algorithm.val_period=0"),
    *("logger.plots=false", "checkpoint.save_period=0", "checkpoint.export_hf_at_end=false"),
]
WAYS = {"synchronous": [], "partial rollouts": ["async=partial"]}
# Largest loss of held-out accuracy that counts as equal.
LOSS = 0.05


def main(arguments: list[str]) -> None:
    seeds = [int(argument) for argument in arguments] or list(SEEDS)
    write(seeds, [])


def write(seeds: list[int], own: list[str]) -> Path:
    """Run each seed both ways, and write the record."""
    ends: dict[str, list[float]] = {way: [] for way in WAYS}
    ages, steps_s = {way: list[float]() for way in WAYS}, {way: list[float]() for way in WAYS}
    for seed in seeds:
        for way, overrides in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                steps = run_in(Path(folder) / "run", [*COMMON, *overrides, *own, f"algorithm.seed={seed}"])
            ends[way].append(steps[-1]["validation/accuracy"])
            ages[way].append(statistics.fmean(step["train/trajectory_age_mean"] for step in steps))
            steps_s[way].append(statistics.median(step["timing/train/total_step_time"] for step in steps))
            print(f"seed {seed}, {way}: accuracy {ends[way][-1]:.3f}, staleness {ages[way][-1]:.2f}", flush=True)
    seeds_of = f"seeds {', '.join(map(str, seeds))}"
    results = []
    for way in WAYS:
        results += [
            record.result("held-out accuracy at the end", f"{way}, {seeds_of}", "share", ends[way]),
            record.result("mean staleness", f"{way}, {seeds_of}", "steps", ages[way]),
            record.result("step time (median of a run)", f"{way}, {seeds_of}", "s", steps_s[way]),
        ]
    gains = [new - old for old, new in zip(*ends.values(), strict=True)]
    half = QUANTILE * statistics.stdev(gains) / math.sqrt(len(gains))
    low, high = statistics.fmean(gains) - half, statistics.fmean(gains) + half
    results.append(record.result("gain of partial rollouts in accuracy", seeds_of, "share", gains))
    bar = record.bar("lower end of the gain's 95 % interval over seeds", low, -LOSS, at_least=True)
    return record.write("partial-rollouts", results, [bar], more={"interval": [low, high]})


def trial() -> None:
    """Compose the runs, and write the record of a tiny one."""
    with tried():
        print(write([1, 2], [f"policy.model_name={KNOWN_MODEL}"]))


if __name__ == "__main__":
    record.start(main, trial)
