"""One policy rank without Ray that exports small shards: export_rank.py MODEL_FOLDER OUTPUT_FOLDER LAYOUTS

For each layout, rank 0 writes a file. It has the weights that the bridge exports and the shards that each rank has
written. It also has what each rank raised where rank 1 could not write. The exported folder is `NAME.hf`.
"""

import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from nemo_rl_lite.models import shards
from nemo_rl_lite.policy.export import export_weights
from nemo_rl_lite.policy.hf_folder import export_folder
from tests.functional.rank import gathered, keep, path_of, policies

SHARD_BYTES = 300_000


def main(model_folder: str, output_folder: str, layouts: str) -> None:
    rank, written, save = int(os.environ["RANK"]), [], shards.save_file

    def noted(tensors, file, metadata):
        written.append(file.name)
        save(tensors, file, metadata)

    def full(tensors, file, metadata):
        raise OSError("No space left on device")

    for name, _, worker in policies(model_folder, layouts):
        target, source = Path(f"{path_of(output_folder, name)}.hf"), Path(model_folder)
        raised = ""
        with patch.object(shards, "save_file", full if rank == 1 else save):
            try:
                export_folder(worker._model, rank, source, target, SHARD_BYTES)
            except OSError as error:
                raised = str(error)
        left = gathered(sorted(path.name for path in target.parent.iterdir()))
        written.clear()
        with patch.object(shards, "save_file", noted):
            export_folder(worker._model, rank, source, target, SHARD_BYTES)
        found = {"written": gathered(list(written)), "raised": gathered(raised), "left": left[0]}
        keep(found | {"weights": dict(export_weights(worker._model))}, output_folder, name)
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
