"""Seconds that a turn's tool takes where hundreds of episodes call a tool that takes one second.

rollout_tools.py [--episodes 512] [--concurrency 256] [--repeats 3]

Each episode has two turns; after each the environment takes a second. Whole runs of the command, one step each, with
the embedded model on this machine's CPUs: with an `async def` step, and with a plain one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import record

SAMPLES, TARGET_S = 8, 5.0
NONE_HELD_OUT = ["algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    results, turns = [], {}
    for name in ("AsyncTool", "PlainTool"):
        runs = [one_run(name, given.episodes, given.concurrency) for _ in range(given.repeats)]
        shape = f"{name}, {given.episodes} episodes x 2 turns, {given.concurrency} at a time"
        for what in runs[0]:
            results.append(record.result(what, shape, "s", [run[what] for run in runs]))
        turns[name] = max(run["a turn's tool, the slowest episode"] for run in runs)
    bars = [record.bar(f"a turn's tool time, {name}", seconds, TARGET_S, False) for name, seconds in turns.items()]
    print(record.write("rollouts-tools", results, bars))


def one_run(name: str, episodes: int, concurrency: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "nemo_rl_lite.train", f"hydra.run.dir={folder}/run", *NONE_HELD_OUT),
            *(f"environment.name=scripts.bench.slow_tools.{name}", "environment.max_turns=2"),
            *(f"environment.concurrency={concurrency}", f"algorithm.num_prompts_per_step={episodes // SAMPLES}"),
            *(f"algorithm.num_generations_per_prompt={SAMPLES}", f"policy.train_global_batch_size={episodes}"),
            *("algorithm.max_num_steps=1", "checkpoint.save_period=0", "checkpoint.export_hf_at_end=false"),
            *("policy.max_total_sequence_length=64", "logger.plots=false"),
        ]
        subprocess.run(command, check=True, cwd=record.ROOT, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    step = next(line for line in lines if line["step"] == 1)
    found = {
        "a turn's tool, the slowest episode": step["timing/rollout/environment_max"] / 2,
        "a turn's tool, mean": step["timing/rollout/environment_mean"] / 2,
        "the whole rollout": step["timing/train/generation"],
    }
    print(name, found, flush=True)
    return found


if __name__ == "__main__":
    main()
