"""Seconds that a turn's tool takes where hundreds of episodes call a tool that takes one second.

rollout_tools.py [--episodes 512] [--concurrency 256] [--repeats 3]

Each episode has two turns; after each the environment takes a second. Whole runs of the command, one step each, with
the embedded model on this machine's CPUs: with an `async def` step, and with a plain one.
"""

import argparse

import record
from whole_runs import STEPS_ALONE, one_run

SAMPLES, TARGET_S = 8, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    results, turns = [], {}
    for name in ("AsyncTool", "PlainTool"):
        runs = [tool_times(name, given.episodes, given.concurrency) for _ in range(given.repeats)]
        shape = f"{name}, {given.episodes} episodes x 2 turns, {given.concurrency} at a time"
        for what in runs[0]:
            results.append(record.result(what, shape, "s", [run[what] for run in runs]))
        turns[name] = max(run["a turn's tool, the slowest episode"] for run in runs)
    bars = [record.bar(f"a turn's tool time, {name}", seconds, TARGET_S, False) for name, seconds in turns.items()]
    print(record.write("rollouts-tools", results, bars))


def tool_times(name: str, episodes: int, concurrency: int) -> dict[str, float]:
    overrides = [
        *(f"environment.name=scripts.bench.slow_tools.{name}", "environment.max_turns=2"),
        *(f"environment.concurrency={concurrency}", f"algorithm.num_prompts_per_step={episodes // SAMPLES}"),
        *(f"algorithm.num_generations_per_prompt={SAMPLES}", f"policy.train_global_batch_size={episodes}"),
        *("algorithm.max_num_steps=1", "policy.max_total_sequence_length=64", *STEPS_ALONE),
    ]
    (step,), _ = one_run(overrides, warm=0)
    found = {
        "a turn's tool, the slowest episode": step["timing/rollout/environment_max"] / 2,
        "a turn's tool, mean": step["timing/rollout/environment_mean"] / 2,
        "the whole rollout": step["timing/train/generation"],
    }
    print(name, found, flush=True)
    return found


if __name__ == "__main__":
    main()
