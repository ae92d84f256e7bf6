"""One policy rank without Ray that counts the bytes of its checkpoints.

checkpoint_io_rank.py MODEL_FOLDER OUTPUT_FOLDER CASES, a JSON object: name -> overrides. Rank 0 writes the counts of
all ranks, by case.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from nemo_rl_lite.checkpoint.store import POLICY, CheckpointStore, Retention
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.policy.worker import MegatronWorker, preload
from tests.functional.rank import gathered, is_first, policies


def main(model_folder: str, output_folder: str, cases: str) -> None:
    common = ["algorithm=sft", "policy.precision=bfloat16", "policy.train_micro_batch_size=2"]
    overrides = {name: [*common, *own] for name, own in json.loads(cases).items()}
    loaded = counting_weights()
    for name, _, worker in policies(model_folder, json.dumps(overrides)):
        starts = gathered(loaded.pop("bytes", 0))
        counts = run(worker, CheckpointStore(Path(output_folder) / name, Retention(1, 0, None, True)))
        if is_first():
            counts = [own | {"weights": nbytes} for own, nbytes in zip(counts, starts, strict=True)]
            (Path(output_folder) / f"{name}.json").write_text(json.dumps(counts))


def counting_weights() -> dict[str, int]:
    """Counts the `bytes` of the Hugging Face weights that this process reads from now on. They are mapped into memory,
    so no read call returns them."""
    preload()
    from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource

    read, counts = SafeTensorsStateSource.load_tensors, dict[str, int]()

    def load_tensors(self, keys):
        tensors = read(self, keys)
        counts["bytes"] = counts.get("bytes", 0) + sum(tensor.nbytes for tensor in tensors.values())
        return tensors

    SafeTensorsStateSource.load_tensors = load_tensors
    return counts


def run(worker: MegatronWorker, store: CheckpointStore) -> list[dict[str, object]]:
    worker.prepare_for_training()
    folder = store.folder / ".step-00000001" / POLICY
    if is_first():
        (store.begin(1) / POLICY).mkdir()
    dist.barrier()
    before = count("wchar")
    worker.begin_save(str(folder))
    everyone = gathered(worker.finish_save())
    own: dict[str, object] = {"written": count("wchar") - before}
    if is_first():
        store.finish(1, {}, {}, {f"{POLICY}/{name}": parts for own in everyone for name, parts in own.items()})
    dist.barrier()
    saved = store.newest().path / POLICY
    before = count("rchar")
    worker.load(str(saved))
    own["read"] = count("rchar") - before
    for other in sorted(store.folder.parent.glob("*/step-00000001")):
        before = count("rchar")
        worker.load(str(other / POLICY))
        own[f"read from {other.parent.name}"] = count("rchar") - before
    own["said"] = load_a_damaged_one(worker, saved)
    return gathered(own)


def load_a_damaged_one(worker: MegatronWorker, saved: Path) -> str:
    """What the error says where a bit of one rank's file has changed."""
    file = saved / "__1_0.distcp"
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    dist.barrier()
    if is_first():
        file.write_bytes(damaged)
    dist.barrier()
    try:
        worker.load(str(saved))
    except CheckpointError as error:
        return str(error)
    finally:
        dist.barrier()
        if is_first():
            file.write_bytes(whole)
        dist.barrier()
    return "nothing was raised"


def count(name: str) -> int:
    """Bytes of this process's read calls (`rchar`) or write calls (`wchar`), also of what memory has."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())[name])


if __name__ == "__main__":
    main(*sys.argv[1:])
