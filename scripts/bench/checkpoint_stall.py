"""Measure for one policy rank how long a checkpoint delays training, and how long its overlapped write takes.

checkpoint_stall.py MODEL [SAVES] [override ...]     all weights of MODEL trained by SFT, one rank, a step between saves
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import record
import torch

from nemo_rl_lite.losses.batch import TokenRow
from nemo_rl_lite.losses.sft import SFTLoss
from nemo_rl_lite.policy.megatron.worker import MegatronWorker
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.run.workers.reserve import policy_arguments

ON_GPU = torch.cuda.is_available()
ROWS, LENGTH = 2, 16


def main() -> None:
    model, rest = sys.argv[1], sys.argv[2:]
    saves = int(rest.pop(0)) if rest and rest[0].isdigit() else 5
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29611")}
    gpu = ["policy=megatron_gpu", "cluster.gpus_per_node=1"] if ON_GPU else []
    batch = [f"policy.train_global_batch_size={ROWS}", "policy.train_micro_batch_size=1"]
    config = compose_config(["algorithm=sft", f"policy.model_name={model}", *batch, *gpu, *rest])
    worker = MegatronWorker(**policy_arguments(config, Path(model)))
    worker.prepare_for_training()
    held_up, written, sizes = [], [], []
    with tempfile.TemporaryDirectory(dir=record.ROOT / "outputs") as place:
        for number in range(saves):
            train(worker, number)
            folder = Path(place) / str(number)
            folder.mkdir()
            begun = time.perf_counter()
            worker.begin_save(str(folder))
            held_up.append(time.perf_counter() - begun)
            worker.finish_save()
            written.append(time.perf_counter() - begun)
            sizes.append(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9)
            shutil.rmtree(folder)
            print(f"save {number}: {held_up[-1]:.3f} s held up, {written[-1]:.3f} s until written", flush=True)
    results = [
        record.result("training is held up, first save", "", "s", held_up[:1]),
        record.result("training is held up, later saves", "", "s", held_up[1:]),
        record.result("until it is written", "", "s", written),
        record.result("bytes written", "", "GB", sizes),
    ]
    record.write(f"checkpoint-stall-{Path(model).name}", results, [])


def train(worker: MegatronWorker, step: int) -> None:
    tokens = torch.randint(4, 14, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    rows = [TokenRow(row, [True] * LENGTH) for row in tokens.tolist()]
    worker.hold(rows)
    worker.train(SFTLoss(), SFTLoss().counts(rows))


if __name__ == "__main__":
    main()
