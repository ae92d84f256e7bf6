"""Time on a CPU how a rollout's rows reach a policy worker: made from episodes, sent to a Ray actor, padded there.

hold_rows.py --name NAME [--rows 512] [--prompt 70] [--response 500] [--repeats 15]

Each repetition does what `GRPO.step` does between generation and the first pass of the policy: `Rollout.rows`,
`RemotePolicy.hold` and the counts that the loss divides by. The actor has the worker's `hold`, and no model. NAME goes
into the record's name, so that records of two checkouts stand next to each other; it runs as it is in older ones.
"""

import argparse
import random
import tempfile
import time

import record

from nemo_rl_lite.cluster.calls import wait
from nemo_rl_lite.cluster.runtime import ray_runtime
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.losses.interface import count_masked
from nemo_rl_lite.policy.megatron.model import ParallelPlace
from nemo_rl_lite.policy.megatron.worker import MegatronWorker
from nemo_rl_lite.rollout.episode import Episode, Rollout
from nemo_rl_lite.run.workers.remote_policy import RemotePolicy


class Keeper:
    """A policy rank that only keeps rows."""

    def __init__(self) -> None:
        self._held = {}

    def place(self) -> ParallelPlace:
        return ParallelPlace(0, 1, 0, 0, True, True)

    hold = MegatronWorker.hold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=70)
    parser.add_argument("--response", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    found: dict[str, list[float]] = {"rows": [], "hold": [], "counts": [], "all": []}
    with ray_runtime(), tempfile.TemporaryDirectory() as folder:
        path = f"{record.ROOT}:{record.ROOT / 'scripts' / 'bench'}"
        group = WorkerGroup("policy", [{}], folder, {"PYTHONPATH": path})
        wait(group.load("hold_rows.Keeper", [{}]))
        wait(group.start([{}]))
        policy = RemotePolicy(group, given.rows)
        for repetition in range(given.repeats + 1):
            rollout = sampled(random.Random(repetition), given.rows, given.prompt, given.response)
            times = [time.perf_counter()]
            rows = rollout.rows([0.5] * given.rows, 3)
            times.append(time.perf_counter())
            held = policy.hold(rows)
            times.append(time.perf_counter())
            count_masked(held.rows)
            times.append(time.perf_counter())
            # The first repetition warms up.
            for name, begin, end in zip(found, (0, 1, 2, 0), (1, 2, 3, 3), strict=True) if repetition else ():
                found[name].append(times[end] - times[begin])
    tokens = given.prompt + given.response
    results = [
        record.result(name, f"{given.rows} rows of {tokens} tokens", "s", times) for name, times in found.items()
    ]
    for one in results:
        print(f"{one['name']}: median {one['median']:.4f} s")
    note = "rows: Rollout.rows; hold: RemotePolicy.hold, through Ray; counts: count_masked; all: the three together"
    print(record.write(f"hold-rows-{given.name}", results, [], note))


def sampled(source: random.Random, rows: int, prompt: int, response: int) -> Rollout:
    episodes = []
    for _ in range(rows):
        episode = Episode(Problem((), ""), [source.randrange(50_000) for _ in range(prompt)], prompt, reward=1.0)
        tokens = tuple(source.randrange(50_000) for _ in range(response))
        logprobs = tuple(-source.random() for _ in range(response))
        episode.add_turn(Completion(tokens, logprobs, "stop", (3,) * response), "")
        episodes.append(episode)
    return Rollout(episodes, 8, 0)


if __name__ == "__main__":
    main()
