"""One rank of a policy without Ray that trains on episodes with several rows, of which each rank is the launcher too.

episodes_rank.py MODEL_FOLDER OUTPUT_FOLDER CASES, a JSON object of overrides by case. Rank 0 writes for each case: the
metrics of two optimizer steps, the weights before and after them, and the lengths of each replica's rows.
"""

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import RowBatch, TokenRows
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.policy.graphs import MicroBatchGraphs
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.workers import policy as policy_module
from nemo_rl_lite.workers.policy import RemotePolicy
from tests.functional.graphs_rank import Again, weights_of
from tests.functional.rank import gathered, keep, policies
from tests.unit.rollout.histories import wandered

EPISODES, STEPS, LEVELS = 8, 2, (True, False, "constant")


class Everywhere:
    """`WorkerGroup` of which each rank runs its own part of a call. All ranks have the same results."""

    def __init__(self, worker: MegatronWorker, size: int):
        self._worker, self._rank, self._size = worker, int(os.environ["RANK"]), size

    def __len__(self) -> int:
        return self._size

    def put(self, value: Any) -> Any:
        return value

    def call(self, method: str, *arguments: Any, phase: str = "") -> list[Any]:
        return self.call_each(method, [arguments] * len(self), phase)

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]], phase: str = "") -> list[Any]:
        return gathered(getattr(self._worker, method)(*arguments[self._rank]))


def main(model_folder: str, output_folder: str, cases: str) -> None:
    policy_module.wait = lambda call: call
    for name, config, worker in policies(model_folder, cases):
        if "graphs" in name:
            worker._train_layout = replace(worker._train_layout, in_buckets=True, least_saved=None)
            worker._graphs = MicroBatchGraphs(worker._model, Again())
        keep(train(config, worker), output_folder, name)


def train(config: Config, worker: MegatronWorker) -> dict[str, Any]:
    """Take two steps with each way to average. Only the first uses logprobs of the training pass."""
    group = Everywhere(worker, int(os.environ["WORLD_SIZE"]))
    remote = RemotePolicy(group, EPISODES // STEPS)  # pyrefly: ignore
    before, options, metrics, lengths = weights_of(worker), config.options(GRPOConfig).loss_fn, [], []
    for number, level in enumerate(LEVELS):
        group.call("prepare_for_logprob")
        batch = remote.put_batch(sampled_rows(number))
        lengths.append(gathered((worker._held["train"].lengths.tolist(), worker._held["train"].mask.sum(1).tolist())))
        remote.score(batch, ("later", "reference") if level is True else ("previous", "reference"))
        group.call("prepare_for_training")
        metrics.append(remote.train(batch, GRPOLoss(replace(options, token_level_loss=level))))
    return {"metrics": metrics, "before": before, "after": weights_of(worker), "lengths": lengths}


def sampled_rows(number: int) -> RowBatch:
    """Rows of agents that change their histories, with tokens of the model's vocabulary."""
    episodes = [wandered(seed, steps=3)[0] for seed in range(EPISODES * number, EPISODES * (number + 1))]
    source, draw = random.Random(number), np.random.default_rng(number)
    rows = Rollout(episodes, 1, 0).rows([source.gauss(0, 1) for _ in episodes], 0)
    assert isinstance(rows, TokenRows) and rows.episodes is not None
    logprobs = np.where(rows.mask, draw.normal(-4, 0.3, len(rows.mask)), 0).astype(np.float32)
    return replace(rows, tokens=rows.tokens % 56 + 4, generation_logprobs=logprobs)


if __name__ == "__main__":
    main(*sys.argv[1:])
