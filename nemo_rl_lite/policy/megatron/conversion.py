"""Weights -> a Hugging Face folder: those of a run's ranks, or of a checkpoint, in this process without Ray."""

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.policy import PolicyConfig
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.models.folder import on_host, write_hf_folder
from nemo_rl_lite.policy.megatron.batches import forward_scores
from nemo_rl_lite.policy.megatron.checkpoint import PolicyState
from nemo_rl_lite.policy.megatron.export_recipe import export_weights
from nemo_rl_lite.policy.megatron.micro_batches import Layout
from nemo_rl_lite.policy.megatron.model import MegatronModel, build_model
from nemo_rl_lite.policy.megatron.provider import torch_dtype
from nemo_rl_lite.refit.transport.report import PROBE_TOLERANCE

_PROBE_TOKENS = 32


def export_folder(model: MegatronModel, rank: int, source: Path, target: Path) -> None:
    """Write the model to the folder `target`, with the configuration and tokenizer of the folder `source`. Collective;
    rank 0 writes."""
    weights = iter(export_weights(model))
    try:
        if rank == 0:
            write_hf_folder(on_host(weights), source, target)
    finally:
        # The other ranks take part in the gathers, and keep nothing.
        for _ in weights:
            pass


def convert(config: Config, model_path: Path, saved: Path, target: Path, say: Callable[[str], None]) -> float:
    """Write the weights of the checkpoint's policy folder `saved` to the folder `target`, after they were read back by
    transformers and gave a sequence the logprobs that megatron-core's model gives it; returns the mean difference in
    nats. `model_path`: the model that the run started from. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in
    the environment, for one rank.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the two models differ by more than
            `PROBE_TOLERANCE`.
    """
    on_gpu = torch.cuda.is_available()
    policy = _in_one_process(config.policy)
    say(f"building the model on {'a GPU' if on_gpu else 'the CPU'}")
    limit_s, seed = config.cluster.collective_timeout_s, config.algorithm.seed
    model = build_model(policy, str(model_path), on_gpu, limit_s, seed, trains=False)
    PolicyState(model, None, None).load_weights(saved)
    tokens_1T = _probe(model.bridge.hf_pretrained.config.vocab_size)
    lengths_1 = torch.tensor([tokens_1T.shape[1]])
    scored = forward_scores(model, tokens_1T, lengths_1, Layout.configured(policy, "logprob", on_gpu), 1.0)
    if scored is None:
        raise RuntimeError("one process has the whole model, and so its logits")
    logprobs_1T = scored["logprobs"]
    weights, device = on_host(export_weights(model)), model.device
    # The folder's own model takes its place.
    del model
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    tolerance, differences = PROBE_TOLERANCE[config.policy.precision], []

    def check(folder: Path) -> None:
        own_1T = _logprobs_of_folder(folder, tokens_1T, torch_dtype(policy.precision), device)
        differences.append((own_1T - logprobs_1T).abs().mean().item())
        if not differences[0] <= tolerance:
            raise CheckpointError(
                f"{folder} gives a probe logprobs that differ from the checkpoint's by {differences[0]:.4f} nats on "
                f"average (limit {tolerance:g} in {config.policy.precision}); {target} was not written"
            )

    say("writing the folder and reading it back")
    write_hf_folder(weights, model_path, target, check)
    return differences[0]


def _in_one_process(policy: PolicyConfig) -> PolicyConfig:
    parallel = dataclasses.replace(
        policy.megatron_cfg,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
        fine_grained_activation_offloading=False,
    )
    return dataclasses.replace(policy, megatron_cfg=parallel)


def _probe(vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (1, _PROBE_TOKENS), generator=generator)


def _logprobs_of_folder(folder: Path, tokens_1T: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """By transformers; entry t belongs to token t, entry 0 is 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    with torch.no_grad():
        logits = model(tokens_1T.to(device)).logits.float().cpu()
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, tokens_1T[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0))
