"""A vLLM engine in a separate process that quantises its linear weights, and what it has of them after each refit.

quantized_process.py MODEL_FOLDER SOURCE OUTPUT. vLLM's own kernels for FP8 weights need a GPU, or a CPU with AMX, so a
plain one takes their place here; quantising and reloading are vLLM's. As on a GPU, torch traces the functions that vLLM
compiles, without a compiler behind it.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.interface import Completion, Request, Sampling
from nemo_rl_lite.generation.vllm.worker import VLLMEngine
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.validation.compose import compose_config

BLOCK = 128


class PlainKernel(linear.CPUFp8BlockScaledMMKernel):
    """Multiplies with the weights that the FP8 ones and their scales stand for."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave them as vLLM has quantised them."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
        scales = layer.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = layer.weight.float() * scales[: layer.weight.shape[0], : layer.weight.shape[1]]
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def main(model_folder: str, source_file: str, output: str) -> None:
    torch._dynamo.config.disable, current_platform.simple_compile_backend = False, "eager"
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [PlainKernel]
    config = compose_config(
        [f"policy.model_name={model_folder}", "policy.max_total_sequence_length=32", "policy.precision=bfloat16"]
    )
    config.generation.vllm_kwargs["quantization"] = "fp8_per_block"
    engine = VLLMEngine(config.generation, config.policy, model_folder, seed=0, on_gpu=False)
    (worker,) = engine._engine.collective_rpc(lambda worker: [worker])[0]
    model = worker.model_runner.get_model()

    def linears() -> dict[str, tuple[Tensor, Tensor]]:
        layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "weight_scale_inv")}
        return {name: (layer.weight.clone(), layer.weight_scale_inv.clone()) for name, layer in layers.items()}

    def addresses() -> list[int]:
        return [parameter.data_ptr() for parameter in model.parameters()]

    def sampled() -> Completion:
        return engine.sample_now(Request((1, 5, 6, 7, 8, 41), Sampling(0.0, 1.0, None, 8, (), ()), seed=1))

    def refit(name: str) -> RefitReport:
        engine.join_refit([pickle.loads(Path(source_file + name).read_bytes())])
        return engine.receive_weights(1)[0]

    before = addresses()
    seen: dict[str, Any] = {"loaded": linears(), "sampled": sampled()}
    for name in (".new", ".broadcast"):
        seen[f"checksums{name}"] = refit(name).checksums
        seen[f"linears{name}"], seen[f"sampled{name}"] = linears(), sampled()
    seen["moved"] = addresses() != before
    try:
        refit(".partial")
    except RefitError as error:
        seen["partial"] = str(error)
    torch.save(seen, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
