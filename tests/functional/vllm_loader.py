"""vLLM's own model classes with their own loaders, before they pack anything: vllm_loader.py [FOLDER OTHER]...

Watched copies must bring the other model's weights where the loader brings them. Exits 0 where they do.
"""

import sys
from itertools import batched
from pathlib import Path

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


def main(*folders: str) -> None:
    for first, second in batched(folders, 2):
        check(first, second)


def check(folder: str, other: str) -> None:
    import_model_class(Path(folder))
    config = EngineArgs(
        model=folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True
    ).create_engine_config()
    first, second = weights(folder), weights(other)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        # Experts have a group of their own.
        destroy_model_parallel()
        initialize_model_parallel(1)
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


def weights(folder: str) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
