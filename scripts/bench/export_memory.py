"""Measure the peak memory of `nrl-lite export`: export_memory.py [LAYERS SHARD_MB]

Exports checkpoints of random float32 models, which differ only in their number of layers. The peak is the process's
resident memory, so it includes imported libraries. An export of two layers shows their share.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import record
from whole_runs import processes

from nemo_rl_lite import export

# 12.6 MB per layer, and 0.1 MB outside of the layers.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
FEW = 2


def main(arguments: list[str]) -> None:
    measure(*map(int, arguments or (32, 40)))


def make(run: Path, layers: int) -> None:
    """Write a run's folder with a model and a checkpoint of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rl_lite.checkpoint.store import POLICY, CheckpointStore, Retention
    from nemo_rl_lite.models.embedded import build_tokenizer
    from nemo_rl_lite.policy.model import build_model
    from nemo_rl_lite.system.machine import free_port
    from nemo_rl_lite.validation.compose import compose_config

    folder = run / "random"
    tokenizer = build_tokenizer()
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", **SIZES, **ends, num_hidden_layers=layers)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = compose_config([f"policy.model_name={folder}"])
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in place.items()})
    model = build_model(config.policy, str(folder), False, 60, 0, trains=False)
    store = CheckpointStore(run / "checkpoints", Retention(1, 0, None, True))
    from megatron.core import dist_checkpointing

    (policy := store.begin(1) / POLICY).mkdir()
    dist_checkpointing.save({"model0": model.chunks[0].sharded_state_dict()}, str(policy))
    store.finish(1, {}, {"config": dataclasses.asdict(config)})


def peak_bytes(run: Path, shard_mb: int) -> int:
    """Export the checkpoint of a run that `make` wrote; return this process's peak resident memory."""
    export.main([str(run), "--max-shard-size", f"{shard_mb}MB"])
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process that has imported megatron-core; return its result."""
    with ProcessPoolExecutor(1, processes(False)) as pool:
        return pool.submit(work, *arguments).result()


def exported_bytes(run: Path) -> int:
    index = json.loads((run / "hf-step-00000001" / "model.safetensors.index.json").read_text())
    return index["metadata"]["total_size"]


def measure(layers: int, shard_mb: int) -> None:
    """Export both models, and write the record."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / str(count) for count in (FEW, layers)]
        for run, count in zip(runs, (FEW, layers), strict=True):
            in_process(make, run, count)
        few, many = (in_process(peak_bytes, run, shard_mb) for run in runs)
        model = exported_bytes(runs[1])
    config = f"{layers} layers, shards of {shard_mb} MB"
    results = [
        record.result("weights", config, "MB", [model / 1e6]),
        record.result("peak resident memory", f"{FEW} layers", "MB", [few / 1e6]),
        record.result("peak resident memory", config, "MB", [many / 1e6]),
        record.result("peak above that of few layers", config, "MB", [(many - few) / 1e6]),
    ]
    bar = record.bar("peak above that of few layers, share of the weights", (many - few) / model, 0.5, at_least=False)
    print(record.write("export-memory", results, [bar]))


def trial() -> None:
    measure(4, 20)


if __name__ == "__main__":
    record.start(main, trial)
