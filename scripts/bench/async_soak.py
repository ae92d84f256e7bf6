"""Prove that asynchronous training loses no prompt and repeats none, whatever is killed: async_soak.py [STEPS] [FOLDER]

A run has two vLLM engines and a policy rank, with `algorithm.rollouts.source=queue` and new weights in flight, on CPUs.
About every 30 seconds SIGKILL hits an engine, the policy rank, the launcher, Ray's gcs_server or raylet, or the
launcher's whole process group (see soak.py). Then the samples that the run has written, its metrics and its last
checkpoint are compared with the training data: the task makes a prompt from its position, so it is known which prompts
must have been trained. An engine holds only two requests at a time, so rollouts are under way at almost every moment.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import record
from soak import Soak

from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.data.formats import problems
from nemo_rl_lite.data.sources import training_set
from nemo_rl_lite.rollout.store import ROLLOUTS, read_rollout, step_of
from nemo_rl_lite.rules.compose import compose_config

MAX_AGE, PROMPTS = 2, 8
# A start takes half a minute or more, so some of the starts are hit.
KILL_EVERY_S, HIT_A_START = 30.0, 0.15
OVERRIDES = (
    *("algorithm.rollouts.source=queue", f"algorithm.rollouts.max_trajectory_age_steps={MAX_AGE}"),
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
    *("generation.colocated.enabled=false", "generation.data_parallel_size=2", "generation.vllm_cfg.max_num_seqs=2"),
    "algorithm.max_val_samples=16",
)
WORKERS = ("generation-0", "generation-1", "policy-0")


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp())
    soak = Soak(folder / "async", steps, random.Random(0), OVERRIDES, WORKERS, KILL_EVERY_S, HIT_A_START)
    started = time.monotonic()
    soak.run()
    results = [record.result("whole run", "async", "s", [time.monotonic() - started]), *soak.recovered()]
    trained, repeated = samples_of(soak.folder, ROLLOUTS), samples_of(soak.folder, f"{ROLLOUTS}-undone")
    wanted = Counter(_prompts(PROMPTS * steps))
    found = Counter(prompt for own in trained.values() for prompt in own)
    ages = dict(_series(soak.folder, "train/trajectory_age_max"))
    saved = json.loads((soak.folder / "checkpoints" / f"step-{steps:08d}" / "checkpoint.json").read_text())
    left = saved["record"]["rollouts"]
    results += [
        record.result("kills", "async", "", [len(soak.kills)]),
        record.result("steps taken again", "async", "", [len(_series(soak.folder, "train/loss", "-undone"))]),
        record.result("prompts trained", "async", "", [found.total()]),
        record.result("largest age of a step's tokens", "async", "steps", list(ages.values())),
    ]
    others = sum(own != trained[step] for step, own in repeated.items())
    unused = len(left["ahead"]) + len(left.get("returned", ())) + abs(left["position"] - PROMPTS * steps)
    bars = [
        record.bar("steps in the end", len(trained.keys() & ages.keys() & set(range(1, steps + 1))), steps, True),
        record.bar("steps asked for", steps, 200, at_least=True),
        record.bar("kinds of processes that were killed", len(soak.recovery_s), len(soak.faults), at_least=True),
        record.bar("prompts trained twice", (found - wanted).total(), 0, at_least=False),
        record.bar("prompts lost", (wanted - found).total(), 0, at_least=False),
        record.bar("steps that had other prompts when they were taken again", others, 0, at_least=False),
        record.bar("places in the data that the last checkpoint counts otherwise", unused, 0, at_least=False),
        record.bar("largest age of a token in steps", max(ages.values()), MAX_AGE, at_least=False),
    ]
    sys.stdout.write(record.write("async-soak", results, bars).read_text())


def samples_of(folder: Path, name: str) -> dict[int, list[str]]:
    """The prompts of each step that a run has trained on, in their order, from one of its folders of samples."""
    files = sorted((folder / name).glob("step-*-train.parquet"))
    return {step_of(file): [row["prompt"][-1]["content"] for row in _first_samples(file)] for file in files}


def _first_samples(file: Path) -> Iterable[dict]:
    return (row for row in read_rollout(file) if row["sample"] == 0)


def _prompts(count: int) -> list[str]:
    """The prompts at the first `count` positions of the training data."""
    config = compose_config()
    training = training_set(config.data, config.options(GRPOConfig).seed, problems(()))
    return [training.problem(position).messages[-1]["content"] for position in range(count)]


def _series(folder: Path, name: str, which: str = "") -> list[tuple[int, float]]:
    """The steps and values of a metric of a run."""
    file = folder / f"metrics{which}.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [(line["step"], line[name]) for line in lines if name in line]


if __name__ == "__main__":
    main()
