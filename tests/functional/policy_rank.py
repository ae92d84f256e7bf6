"""One policy rank without Ray, in one layout after another: logprobs, two optimizer steps, exported weights.

policy_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS, a JSON object of overrides by layout. Rank 0 writes all ranks'
results to a file for each.
"""

import os
import sys
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.losses.batch import TokenRow, TokenRows
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.models.shape import read_model_shape
from nemo_rl_lite.policy.export import export_weights, find_export
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.refit.buckets import BucketReshard, assemble
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.layout import RefitPlan, same_bytes, view
from nemo_rl_lite.refit.trace import Recipe
from tests.functional.rank import gathered, keep, path_of, policies

TEMPERATURE = 0.7


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    for name, config, worker in policies(model_folder, layouts, temperature=TEMPERATURE, keep_reference=True):
        run(config, worker, output_folder, name)


def run(config: Config, worker: MegatronWorker, output_folder: str, name: str) -> None:
    place = worker.place()
    source = torch.Generator().manual_seed(1)
    rows, length = 16, 12
    tokens = torch.randint(4, 60, (rows, length), generator=source)
    lengths = torch.randint(7, length + 1, (rows,), generator=source)
    lengths[1] = length
    advantages = torch.randn(rows, generator=source)
    generation = -4 + 0.3 * torch.randn(rows, length, generator=source)
    experts = forged_experts(config.policy.model_name, lengths) if config.policy.router_replay.enabled else None
    batch = [
        TokenRow(
            tokens[row, :own].tolist(),
            [place >= 5 for place in range(own)],
            generation[row, :own].tolist(),
            advantages[row].item(),
            routed_experts=None if experts is None else experts[row][experts[row, :, 0, 0] >= 0].numpy(),
        )
        for row, own in enumerate(lengths.tolist())
    ]
    loss = GRPOLoss(config.options(GRPOConfig).loss_fn)
    counts = loss.counts(batch)

    def score() -> tuple[np.ndarray | None, np.ndarray | None]:
        """The policy's and the reference's logprobs of this replica's rows, which the worker keeps."""
        worker.score(("previous", "reference"), counts)
        held = worker._held["train"]
        if not place.reports:
            return None, None
        # The rows of a replica are padded to its longest.
        missing = (0, length - held.tokens.shape[1])
        both = (held.previous_logprobs, held.reference_logprobs)
        return tuple(torch.nn.functional.pad(one, missing).numpy() for one in both)

    # The phases of a GRPO step, in its order.
    worker.prepare_for_refit(engine_bytes=0)
    worker.plan_refit(config.refit, shared_device=True, consumers=1)
    worker.prepare_for_generation()
    worker.prepare_for_logprob()
    share = slice(place.data_rank * rows // place.data_size, (place.data_rank + 1) * rows // place.data_size)
    worker.put_batch(TokenRows.of(batch[share]).with_layers(place.replayed_layers))
    first, reference = score()
    steps = []
    for _ in range(2):
        worker.prepare_for_training()
        trained = worker.train(loss, counts)
        steps.append(trained and trained[0])
        worker.prepare_for_refit(engine_bytes=0)
        worker.prepare_for_generation()
        worker.prepare_for_logprob()
        # The reference's weights take the policy's place for a forward pass, which must leave no trace.
        previous, reference_after = score()
    own_after, _ = score()

    everyone = gathered((place, first, reference, previous, reference_after, own_after, steps))
    ranks = len(everyone)
    assembled = gathered([assembled_is_the_export(worker, own) for own in (list(range(ranks)), [0], [ranks - 1])])
    worker.export_hf(f"{path_of(output_folder, name)}.hf")
    kept = gathered((place, kept_and_expected(worker, batch[share], loss)))
    replicas = sorted((entry for entry in everyone if entry[0].reports), key=lambda entry: entry[0].data_rank)
    saved = {"tokens": tokens, "lengths": lengths, "temperature": TEMPERATURE, "assembled": assembled}
    saved |= {"experts": experts, "replicas": [entry[1:] for entry in replicas]}
    keep(saved | {"kept": [own for one, own in kept if one.reports]}, output_folder, name)
    dist.barrier()


def kept_and_expected(worker: MegatronWorker, batch: list[TokenRow], loss: GRPOLoss) -> tuple[Tensor, Tensor] | None:
    """The logprobs that two training passes, one for each half of the rows, keep of them, and those that a separate
    pass before each gives."""
    counts, half, expected = loss.counts(batch), len(batch) // 2, []
    worker.put_batch(TokenRows.of(batch).with_layers(worker.place().replayed_layers))
    held = worker._held["train"]
    worker._held["train"] = replace(held, reference_logprobs=torch.zeros(held.tokens.shape))
    for rows in (slice(0, half), slice(half, None)):
        worker.prepare_for_logprob()
        expected.append(worker._pass_logprobs("train", rows, then_train=True))
        worker.prepare_for_training()
        worker.train(loss, counts, rows, mismatch_counts=counts)
    return (worker._held["train"].previous_logprobs, torch.cat(expected)) if worker.place().reports else None


def forged_experts(model_folder: str, lengths: torch.Tensor) -> torch.Tensor:
    """Experts [rows, length, layers, k] that no router chose. None (-1) for the last token of a row, for all but the
    first two tokens of every fifth row, and for the padding."""
    shape = read_model_shape(model_folder)
    assert shape is not None
    source = torch.Generator().manual_seed(2)
    order = torch.rand(len(lengths), int(lengths.max()), shape.layers, shape.experts, generator=source).argsort(-1)
    forged, known = order[..., : shape.experts_per_token].to(torch.int16), lengths - 1
    known[4::5] = 2
    forged[torch.arange(forged.shape[1]) >= known[:, None]] = -1
    return forged


def assembled_is_the_export(worker: MegatronWorker, wanting: list[int]) -> tuple[bool, int, int]:
    """On this rank, where weights are put together for some ranks: whether they are what megatron-bridge exports now,
    how many buckets there are, and how many collectives they take."""
    plan, model, rank = worker._producer.plan, worker._model, int(os.environ["RANK"])
    found, device = find_export(model, plan), model.device
    recipe = found.recipe if rank in wanting else None
    assembly = assemble(plan, found.parameters, recipe, device, [], 60)
    exported, same = dict(export_weights(model)), True
    if assembly is not None:
        give_up(assembly, plan, recipe, device)
    for _ in range(2):
        if assembly is not None:
            assembly.start()
        for index, bucket in enumerate(plan.buckets) if assembly else ():
            buffer = torch.full((bucket.nbytes,), 7, dtype=torch.uint8, device=device) if recipe is not None else None
            assembly.begin(index, RefitReport())
            assembly.fill(index, buffer, RefitReport())
            if buffer is not None:
                same = same and all(same_bytes(view(buffer, slot), exported[slot.name]) for slot in bucket.slots)
    return same, len(plan.buckets), assembly.collectives if assembly else 0


def give_up(assembly: BucketReshard, plan: RefitPlan, recipe: Recipe | None, device: torch.device) -> None:
    """A refit in which those that want weights come no further than the first bucket, or the second one's begin."""
    assembly.start()
    if recipe is None:
        assembly.finish(lambda index: None)
        return
    memory = lambda index: torch.empty(plan.buckets[index].nbytes, dtype=torch.uint8, device=device)  # noqa: E731
    assembly.begin(0, RefitReport())
    assembly.fill(0, memory(0), RefitReport())
    if int(os.environ["RANK"]) % 2 and len(plan.buckets) > 1:
        assembly.begin(1, RefitReport())
    assembly.finish(memory)


if __name__ == "__main__":
    main(*sys.argv[1:])
