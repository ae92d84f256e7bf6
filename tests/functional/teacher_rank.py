"""One rank of a teacher without Ray, in one layout after another: teacher_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS, a
JSON object of overrides by layout. Rank 0 writes what all replicas say of their rows, twice, to a file for each."""

import json
import sys

import torch

from nemo_rl_lite.losses.batch import TokenRow, TokenRows
from nemo_rl_lite.policy.teacher import TeacherWorker
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.reserve import teacher_arguments
from tests.functional.rank import gathered, keep, leave


def rows() -> TokenRows:
    source = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 13, (8,), generator=source).tolist()
    tokens = [torch.randint(4, 60, (own,), generator=source).tolist() for own in lengths]
    return TokenRows.of([TokenRow(own, [place > 0 for place in range(len(own))]) for own in tokens])


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    for name, overrides in json.loads(layouts).items():
        config = compose_config(["algorithm=distillation", f"teacher.model_name={model_folder}", *overrides])
        worker = TeacherWorker(**teacher_arguments(config) | {"threads": 1})
        place, found = worker.place(), []
        each = len(rows()) // place.data_size
        for _ in range(2):
            worker.prepare_for_logprob(0)
            found.append(worker.score(rows()[place.data_rank * each : (place.data_rank + 1) * each], 0))
            worker.leave()
        moves = [name for name, _ in worker.pop_moves()]
        everyone = gathered((place.data_rank, found, moves) if place.reports else None)
        keep([one for one in everyone if one is not None], output_folder, name)
        leave(worker)


if __name__ == "__main__":
    main(*sys.argv[1:])
