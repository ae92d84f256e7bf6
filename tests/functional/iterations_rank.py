"""One policy rank without Ray that trains on a rollout several times.

iterations_rank.py MODEL_FOLDER OUTPUT_FOLDER CASES, a JSON object of overrides by name. Each case writes its rollout,
its metrics and its weights.
"""

import sys
from typing import Any

import torch

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.config.sizes import iterations, sequences_per_optimizer_step
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.run.jobs import _scored
from nemo_rl_lite.workers import policy as policy_module
from nemo_rl_lite.workers.policy import RemotePolicy
from tests.functional.rank import keep, path_of, policies

ROWS, LENGTH, PROMPT = 8, 10, 4


class Group:
    """The worker of this process as a `WorkerGroup`."""

    def __init__(self, worker: Any):
        self._worker = worker

    def put(self, value: Any) -> Any:
        return value

    def call(self, method: str, *arguments: Any, phase: str = "") -> Any:
        return [getattr(self._worker, method)(*arguments)]

    def call_each(self, method: str, arguments: Any, phase: str = "") -> Any:
        return self.call(method, *arguments[0])


def main(model_folder: str, output_folder: str, cases: str) -> None:
    policy_module.wait = lambda call: call
    for name, config, worker in policies(model_folder, cases):
        options = config.options(GRPOConfig)
        remote = RemotePolicy(Group(worker), sequences_per_optimizer_step(config), iterations=iterations(config))  # pyrefly: ignore
        source = torch.Generator().manual_seed(3)
        tokens = torch.randint(4, 60, (ROWS, LENGTH), generator=source)
        advantages = torch.randn(ROWS, generator=source)
        engine = (torch.full((ROWS, LENGTH), -4.0) + 0.1 * torch.randn(ROWS, LENGTH, generator=source)).tolist()
        mask = [place >= PROMPT for place in range(LENGTH)]
        rows = [TokenRow(*own) for own in zip(tokens.tolist(), [mask] * ROWS, engine, advantages.tolist(), strict=True)]
        worker.prepare_for_logprob()
        batch = remote.put_batch(rows)
        if scored := _scored(config):
            remote.score(batch, scored)
        remote.prepare_for_training()
        metrics = remote.train(batch, GRPOLoss(options.loss_fn))
        worker.export_hf(f"{path_of(output_folder, name)}.hf")
        keep({"tokens": tokens, "advantages": advantages, "metrics": metrics}, output_folder, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
