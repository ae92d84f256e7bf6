"""One policy rank without Ray that saves and resumes, in one layout after another.

checkpoint_rank.py MODEL_FOLDER OUTPUT_FOLDER CASES, a JSON object: name -> [overrides, saved by which case, or null].
Rank 0 writes what the ranks that report measured, by case.
"""

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from nemo_rl_lite.errors import CheckpointError, HostMemoryError
from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.policy import checkpoint
from nemo_rl_lite.policy import worker as policy_worker
from nemo_rl_lite.policy.worker import MegatronWorker
from tests.functional.rank import gathered, is_first, policies

ROWS, LENGTH = 8, 12
MASK = [False] * 4 + [True] * (LENGTH - 4)


class NotANumber(SFTLoss):
    """On the last rank."""

    def __call__(self, logprobs_BT, batch, counts):
        value, metrics = super().__call__(logprobs_BT, batch, counts)
        return value * (float("nan") if dist.get_rank() == dist.get_world_size() - 1 else 1), metrics


def never(*_, **__):
    raise AssertionError("no one reads the scores of supervised rows")


def main(model_folder: str, output_folder: str, cases: str) -> None:
    policy_worker._update = never  # pyrefly: ignore
    whole = json.loads(cases)
    common = ["algorithm=sft", f"policy.train_global_batch_size={ROWS}", "policy.train_micro_batch_size=4"]
    overrides = {name: [*common, *own] for name, (own, _) in whole.items()}
    for name, _, worker in policies(model_folder, json.dumps(overrides)):
        run(worker, Path(output_folder), name, whole[name][1])


def run(worker: MegatronWorker, folder: Path, name: str, saved_by: str | None) -> None:
    worker.prepare_for_training()
    measured = {}
    if saved_by is None:
        train(worker, [0, 1])
        unfinished = folder / "unfinished" / name
        no_memory = patch.object(checkpoint, "copies_in", side_effect=HostMemoryError("copies of a checkpoint"))
        measured["no host memory"] = fail_to_save(worker, unfinished / "1", no_memory)
        measured["a full disk"] = fail_to_save(worker, unfinished / "2", full_disk())
        save(worker, folder / name)
        measured["after a skipped step"] = skip(worker)
    else:
        worker.load(str(folder / saved_by))
    measured["steps"] = train(worker, [2, 3])
    worker.finish_save()
    everyone = gathered((worker.place().reports, worker.place().data_rank, measured))
    worker.export_hf(str(folder / f"{name}.hf"))
    if is_first():
        reports = [own for reports, _, own in sorted(everyone, key=lambda one: one[1]) if reports]
        (folder / f"{name}.json").write_text(json.dumps(reports))
    dist.barrier()


def train(worker: MegatronWorker, steps: list[int], loss: SFTLoss | None = None) -> list[dict[str, float] | None]:
    place, results = worker.place(), []
    for step in steps:
        tokens = torch.randint(4, 14, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        rows = [TokenRow(row, MASK) for row in tokens.tolist()]
        worker.put_batch(
            rows[place.data_rank * ROWS // place.data_size : (place.data_rank + 1) * ROWS // place.data_size]
        )
        trained = worker.train(loss or SFTLoss(), SFTLoss().counts(rows))
        results.append(trained and trained[0])
    return results


def save(worker: MegatronWorker, folder: Path) -> None:
    """Begun here and finished after the steps that follow: these must not get into it."""
    if is_first():
        folder.mkdir(parents=True)
    dist.barrier()
    worker.begin_save(str(folder))


def fail_to_save(worker: MegatronWorker, folder: Path, cause: AbstractContextManager[object]) -> str:
    """What the error says with this cause on one rank."""
    with cause if is_first() else nullcontext():
        save(worker, folder)
        try:
            worker.finish_save()
        except CheckpointError as error:
            return str(error)
    return "nothing was raised"


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can be longer than a little."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def skip(worker: MegatronWorker) -> dict[str, object]:
    """A step whose gradients are not numbers, and whether anything has changed by it."""
    before = [parameter.detach().clone() for parameter in worker._model.parameters()]
    (skipped,) = train(worker, [9], NotANumber())
    after = worker._model.parameters()
    same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    counted = skipped is None or (skipped["skipped_steps"] == 1 and skipped["grad_norm"] != skipped["grad_norm"])
    return {"same": same, "counted": counted}


if __name__ == "__main__":
    main(*sys.argv[1:])
