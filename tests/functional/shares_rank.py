"""One data-parallel rank without Ray: an optimizer step on neighbouring rows, and on other shares.

shares_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS, a JSON object of overrides by layout. Rank 0 writes for each layout
and way: the metrics of the step, whole gradients by name, both ranks' rows, and the seconds of rank 0's passes.
"""

import json
import sys

import torch

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import combine_metrics
from nemo_rl_lite.policy.micro_batches import Layout, balanced_shares
from nemo_rl_lite.policy.worker import MegatronWorker
from tests.functional.rank import gathered, keep, policies

ROWS, RANKS = 16, 2
SHARES = {
    "neighbours": lambda lengths, layout: [list(range(ROWS // RANKS)), list(range(ROWS // RANKS, ROWS))],
    "balanced": lambda lengths, layout: balanced_shares(lengths, RANKS, float, 1, layout, layout.mode == "fixed"),
    "alone": lambda lengths, layout: [[0], list(range(1, ROWS))],
}


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    ways = {f"{name} {way}": own for name, own in json.loads(layouts).items() for way in SHARES}
    for name, config, worker in policies(model_folder, json.dumps(ways)):
        keep(step(config, worker, name.rpartition(" ")[2]), output_folder, name)


def step(
    config: Config, worker: MegatronWorker, way: str
) -> tuple[dict[str, float], dict, list[list[int]], dict[str, list[float]]]:
    rows, loss = sampled_rows(), GRPOLoss(config.options(GRPOConfig).loss_fn)
    layout = Layout.configured(config.policy, "train", on_gpu=False)
    shares = SHARES[way]([len(row.tokens) for row in rows], layout)
    worker.put_batch([rows[index] for index in shares[worker.place().data_rank]])
    worker.score(("previous", "reference"), loss.counts(rows))
    worker.prepare_for_training()
    trained = worker.train(loss, loss.counts(rows))
    replicas = gathered(trained[0])
    gradients = {
        name: parameter.main_grad.clone()
        for chunk in worker._model.chunks
        for name, parameter in chunk.named_parameters()
    }
    metrics = combine_metrics(replicas) | {"grad_norm": replicas[0]["grad_norm"]}
    return metrics, gradients, shares, worker.take_passes()


def sampled_rows() -> list[TokenRow]:
    """Responses to four prompts, mostly alike in length within a prompt, so that the shares of neighbours differ."""
    source = torch.Generator().manual_seed(1)
    rows = []
    for length in (60, 28, 9, 27, 24, 22, 25, 23, 12, 10, 11, 9, 8, 7, 9, 8):
        mask = [place >= 5 for place in range(length)]
        generation = (-4 + 0.3 * torch.randn(length, generator=source)).tolist()
        tokens = torch.randint(4, 60, (length,), generator=source).tolist()
        rows.append(TokenRow(tokens, mask, generation, torch.randn((), generator=source).item()))
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
