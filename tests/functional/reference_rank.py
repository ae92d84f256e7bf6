"""One policy rank without Ray whose reference policy follows the trained one, in one layout after another.

reference_rank.py MODEL_FOLDER OUTPUT_FOLDER CASES, a JSON object: name -> [overrides, saved by which case, or null].
Rank 0 writes the reference logprobs of all replicas, by case.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.interface import count_masked
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.policy.worker import MegatronWorker
from tests.functional.rank import gathered, is_first, keep, path_of, policies

ROWS, LENGTH = 8, 10
FIRST, SECOND = 0.25, 0.6


def main(model_folder: str, output_folder: str, cases: str) -> None:
    whole = json.loads(cases)
    common = ["algorithm=sft", f"policy.train_global_batch_size={ROWS}", "policy.train_micro_batch_size=4"]
    overrides = {name: [*common, *own] for name, (own, _) in whole.items()}
    for name, _, worker in policies(model_folder, json.dumps(overrides), keep_reference=True):
        run(worker, Path(output_folder), name, whole[name][1])


def run(worker: MegatronWorker, folder: Path, name: str, saved_by: str | None) -> None:
    worker.prepare_for_training()
    measured = {}
    if saved_by is None:
        measured["start"] = reference(worker)
        train(worker, 0)
        worker.export_hf(f"{path_of(folder, name)}.hf")
        worker.follow_policy(FIRST)
        measured["moved"] = reference(worker)
        if is_first():
            path_of(folder, f"{name} saved").mkdir(parents=True)
        dist.barrier()
        worker.begin_save(str(path_of(folder, f"{name} saved")))
    else:
        worker.load(str(path_of(folder, f"{saved_by} saved")))
    # These must not get into the save.
    train(worker, 1)
    measured["later"] = reference(worker)
    worker.follow_policy(SECOND)
    measured["moved again"] = reference(worker)
    train(worker, 2)
    measured["last"] = reference(worker)
    worker.finish_save()
    everyone = gathered((worker.place().reports, worker.place().data_rank, measured))
    replicas = [own for reports, _, own in sorted(everyone, key=lambda one: one[1]) if reports]
    keep({key: np.concatenate([own[key] for own in replicas]) for key in measured}, folder, name)
    dist.barrier()


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(4, 60, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def put(worker: MegatronWorker, seed: int) -> list[TokenRow]:
    place, rows = worker.place(), [TokenRow(row, [True] * LENGTH) for row in tokens_of(seed).tolist()]
    worker.put_batch(rows[place.data_rank * ROWS // place.data_size : (place.data_rank + 1) * ROWS // place.data_size])
    return rows


def train(worker: MegatronWorker, seed: int) -> None:
    worker.train(SFTLoss(), SFTLoss().counts(put(worker, seed)))


def reference(worker: MegatronWorker) -> np.ndarray | None:
    worker.score(("reference",), count_masked(put(worker, 9)))
    found = worker._held["train"].reference_logprobs
    return found.numpy() if worker.place().reports and found is not None else None


if __name__ == "__main__":
    main(*sys.argv[1:])
