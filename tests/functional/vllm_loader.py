"""vLLM's own model classes with their own loaders, before they pack anything: vllm_loader.py OPTIONS [FOLDER OTHER]...

Watched copies must bring the other model's weights where the loader brings them. Exits 0 where they do. OPTIONS are
vLLM's, as a JSON object. With torch's environment variables this is one of several ranks. Writes the shapes of the
rank's parameters of each model to standard output, a JSON object per line.
"""

import json
import os
import sys
from itertools import batched
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from nemo_rl_lite.compat.vllm import import_model_class, weight_loader
from nemo_rl_lite.refit.engine import CopyReplayLoader
from nemo_rl_lite.system.machine import free_port
from tests.unit.refit.test_engine import refit


def main(options: str, *folders: str) -> None:
    for first, second in batched(folders, 2):
        check(first, second, json.loads(options))


def check(folder: str, other: str, options: dict[str, Any]) -> None:
    import_model_class(Path(folder))
    arguments = EngineArgs(model=folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, **options)
    config = arguments.create_engine_config()
    parallel = config.parallel_config
    rank, port = int(os.environ.get("RANK", 0)), os.environ.get("MASTER_PORT") or free_port()
    # Ranks with unlike names do not meet in shared memory, which no one would remove.
    os.environ["VLLM_DIST_IDENT"] = str(rank)
    first, second = weights(folder), weights(other)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(parallel.world_size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        # Experts have a group of their own.
        destroy_model_parallel()
        initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        model = initialize_model(config)
    model.load_weights(second.items())
    expected = {name: parameter.clone() for name, parameter in model.named_parameters()}
    destinations = CopyReplayLoader(weight_loader(model), [*model.parameters(), *model.buffers()])
    for values in (first, second):
        refit(destinations, values, bucket_bytes=100_000)
    assert destinations.filled == set(expected), set(expected) ^ destinations.filled
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), (folder, name)
    assert not destinations.left, destinations.left
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    sys.stdout.write(f"\n{json.dumps(shapes)}\n")
    sys.stdout.flush()


def weights(folder: str) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
