"""One policy rank without Ray: two optimizer steps on long rows, in one layout after another.

context_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS, a JSON object of overrides by layout. Rank 0 writes for each: the
logprobs before, the metrics and this rank's gradients of each step, and what they have added to its weights. The rows
of a mixture of experts tell which experts each token goes to: where rounding chose others, nothing could be compared.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import TokenRow, TokenRows
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import combine_metrics
from nemo_rl_lite.models.shape import ModelShape, read_model_shape
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import policy_arguments
from tests.functional.rank import leave

LENGTHS = (900, 517, 333, 40, 7, 800, 64, 255)


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    for name, overrides in json.loads(layouts).items():
        run(model_folder, Path(output_folder) / name.replace(" ", "-"), overrides)
        torch.cuda.empty_cache()


def run(model_folder: str, output: Path, overrides: list[str]) -> None:
    config = compose_config([f"policy.model_name={model_folder}", *overrides])
    worker = MegatronWorker(**policy_arguments(config, Path(model_folder)) | {"threads": 1})
    place, loss = worker.place(), GRPOLoss(config.options(GRPOConfig).loss_fn)
    shape = read_model_shape(model_folder)
    assert shape
    rows = [replace(row, routed_experts=chosen(len(row.tokens), shape)) for row in sampled_rows()]
    share = len(rows) // place.data_size
    worker.put_batch(TokenRows.of(rows[place.data_rank * share :][:share]).with_layers(place.replayed_layers))
    counts = loss.counts(rows)
    start = master_weights(worker)
    worker.prepare_for_logprob()
    worker.score(("previous", "reference"), counts)
    logprobs, steps = worker._held["train"].previous_logprobs, []
    for _ in range(2):
        worker.prepare_for_training()
        trained = worker.train(loss, counts)
        named = [pair for chunk in worker._model.chunks for pair in chunk.named_parameters()]
        steps.append((trained and trained[0], {name: on_host(own.main_grad) for name, own in named}))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (place, logprobs, [metrics for metrics, _ in steps]))
    moved = [weight - before for weight, before in zip(master_weights(worker), start, strict=True)]
    if os.environ["RANK"] == "0":
        replicas = sorted((one for one in found if one[0].reports), key=lambda one: one[0].data_rank)
        metrics = [
            combine_metrics([own[step] for _, _, own in replicas]) | {"grad_norm": replicas[0][2][step]["grad_norm"]}
            for step in range(2)
        ]
        held = [row for _, own, _ in replicas for row in own]
        scored = [row[:length] for row, length in zip(held, LENGTHS, strict=True)]
        saved = {"logprobs": scored, "metrics": metrics, "gradients": [own for _, own in steps], "moved": moved}
        torch.save(saved, output)
    dist.barrier()
    leave(worker)


def master_weights(worker: MegatronWorker) -> list[torch.Tensor]:
    """Float32 weights as this rank's optimizer has them."""
    return [on_host(own) for group in worker._optimizer.param_groups for own in group["params"]]


def on_host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", torch.float32, copy=True)


def chosen(tokens: int, shape: ModelShape) -> np.ndarray | None:
    """Different experts for each token and layer, [tokens, layers, k]; None for a model without them."""
    if not shape.experts:
        return None
    drawn = np.random.default_rng(tokens).random((tokens, shape.layers, shape.experts))
    return drawn.argsort(axis=-1)[..., : shape.experts_per_token].astype(np.int16)


def sampled_rows() -> list[TokenRow]:
    """Rows with lengths that few ranks divide, one of them shorter than the chunks of four ranks."""
    source, rows = torch.Generator().manual_seed(1), []
    for length in LENGTHS:
        mask = [place >= 3 for place in range(length)]
        generation = (-4 + 0.3 * torch.randn(length, generator=source)).tolist()
        tokens = torch.randint(4, 60, (length,), generator=source).tolist()
        rows.append(TokenRow(tokens, mask, generation, torch.randn((), generator=source).item()))
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
