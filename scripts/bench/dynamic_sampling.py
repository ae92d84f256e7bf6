"""What dynamic sampling costs where many prompts are solved: tokens sampled for each token of the prompts kept.

dynamic_sampling.py MODEL [--prompts 96] [--solved 0.5] [--steps 80] [--after 20] [--seeds 42,1,2]

MODEL: the embedded model's folder, such as outputs/models/reverse-4-digits-seed42-*. Each run trains on a file of
PROMPTS problems of the quickstart's task, of which a share of `--solved` is always judged right; others are solved, or
hopeless, as training goes. Counted are the steps after `--after`. `as published` replaces prompts that teach nothing;
`resting` also leaves them out for some epochs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import record
from whole_runs import STEPS_ALONE

from nemo_rl_lite.data.reverse_digits import ReverseDigits

TARGET, DIGITS = 1.3, 4
WAYS = {"as published": [], "resting": ["algorithm.rest_epochs=16"]}
TASK = [
    *("data=file", "reward.name=partly_solved.partly_solved"),
    *("algorithm.num_prompts_per_step=16", "policy.train_global_batch_size=128"),
    *("algorithm.use_dynamic_sampling=true", "algorithm.dynamic_sampling_max_gen_batches=40", "algorithm.oversample=1"),
    *STEPS_ALONE,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--solved", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--after", type=int, default=20)
    parser.add_argument("--seeds", default="42,1,2")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    task = [*TASK, f"policy.model_name={given.model.resolve()}", f"algorithm.max_num_steps={given.steps}"]
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    mixed: dict[str, list[float]] = {way: [] for way in WAYS}
    tried: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in given.seeds.split(","):
        for way, own in WAYS.items():
            steps = one_run([*task, *given.overrides, *own], int(seed), given.prompts, given.solved)
            late = [step for step in steps if step["step"] > given.after]
            kept = sum(step["train/mean_gen_tokens_per_sample"] * 128 for step in late)
            ratios[way].append(1 + sum(step["train/dropped_tokens"] for step in late) / kept)
            mixed[way] += [step["train/baseline_reward/pct_mixed"] for step in late]
            tried[way].append(sum(step["train/filtered_prompts"] for step in late) / len(late) / 16)
            print(seed, way, f"{ratios[way][-1]:.3f}, prompts replaced for each kept {tried[way][-1]:.2f}", flush=True)
    shape = f"{given.prompts} prompts, {given.solved:.0%} solved from the start, "
    shape += f"steps {given.after + 1} to {given.steps}, seeds {given.seeds}"
    results = [record.result(f"tokens sampled for each token kept, {way}", shape, "", ratios[way]) for way in WAYS]
    results += [record.result(f"prompts replaced for each kept, {way}", shape, "", tried[way]) for way in WAYS]
    results += [record.result(f"share of a step's prompts that teach, {way}", shape, "", mixed[way]) for way in WAYS]
    bars = [
        record.bar("tokens sampled for each token kept, resting (worst seed)", max(ratios["resting"]), TARGET, False),
        record.bar("prompts of a step that teach (least)", min(mixed["resting"]), 1.0, True),
    ]
    print(record.write("rollouts-dynamic-sampling", results, bars, f"model: {given.model.name}"))


def one_run(overrides: list[str], seed: int, prompts: int, solved: float) -> list[dict[str, float]]:
    """Train; return the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        problems = ReverseDigits(DIGITS, seed)
        rows = [problems.problem(place) for place in range(prompts)]
        file = Path(folder) / "train.jsonl"
        texts = [
            {"prompt": row.messages[-1]["content"], "answer": row.answer, "solved": place < solved * prompts}
            for place, row in enumerate(rows)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in texts))
        own = [f"data.train_path={file}", f"algorithm.seed={seed}", f"hydra.run.dir={folder}/run", *overrides]
        command = [sys.executable, "-m", "nemo_rl_lite.train", *own]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path}
        subprocess.run(command, cwd=record.ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/dropped_tokens" in line]


if __name__ == "__main__":
    main()
