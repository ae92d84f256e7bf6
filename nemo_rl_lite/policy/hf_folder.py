"""Write the policy's model to a Hugging Face folder: at the end of a run, and from a checkpoint.

No process holds the whole model. In a run, the ranks share the shards of the folder (`ShardWriter`). From a checkpoint,
one process runs a probe through the model. Each layer's weights are read for its forward pass, exported and dropped.
"""

import logging
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_lite.compat.megatron import load_weights
from nemo_rl_lite.config.schema import Config, PolicyConfig
from nemo_rl_lite.data.tokenizer import load_tokenizer
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.models.folder import SHARD_BYTES, adapter_folder, base_name, complete_hf_folder, replacing
from nemo_rl_lite.models.shards import ShardWriter
from nemo_rl_lite.policy.checkpoint import PolicyState
from nemo_rl_lite.policy.export import Weights, export_weights
from nemo_rl_lite.policy.micro_batches import Layout
from nemo_rl_lite.policy.model import MegatronModel, build_model
from nemo_rl_lite.policy.passes import forward_scores
from nemo_rl_lite.policy.saved_weights import SavedWeights
from nemo_rl_lite.refit.group import all_gather
from nemo_rl_lite.refit.interface import PROBE_TOLERANCE

log = logging.getLogger(__name__)

# Length of the sequence that compares a folder with the checkpoint.
_PROBE_TOKENS = 32
# Names of parameters and modules in a decoder layer begin with its path.
_LAYER = re.compile(r"decoder\.layers\.\d+\.")


def export_folder(model: MegatronModel, rank: int, source: Path, target: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model to `target`, with the configuration and tokenizer of `source`. Collective.

    All ranks that see the file system of rank 0 write shards. The folder replaces an existing one, atomically.

    Raises:
        OSError: a rank could not write its shards. All ranks raise, and nothing is replaced.
    """
    with replacing(target) if rank == 0 else nullcontext() as unfinished:
        folder = all_gather(unfinished)[0]
        writers = [number for number, sees in enumerate(all_gather(folder.is_dir())) if sees]
        weights, failure = iter(export_weights(model)), None
        try:
            if rank in writers:
                writer = ShardWriter(folder, shard_bytes, writers.index(rank), len(writers))
                for name, tensor in weights:
                    writer.add(name, tensor)
                writer.close()
                if rank == 0:
                    complete_hf_folder(folder, source, writer.dtype)
        except Exception as error:  # the other ranks would wait for this one
            failure = f"rank {rank} cannot write to {folder}: {error}"
        # Other ranks take part in the gathers.
        for _ in weights:
            pass
        if failures := [one for one in all_gather(failure) if one is not None]:
            raise OSError("; ".join(failures))


@contextmanager
def exported_adapters(model: MegatronModel, rank: int, base: str, source: Path, target: Path) -> Iterator[None]:
    """Export LoRA's adapters in PEFT's format, with the tokenizer of `source`. The folder `target` appears when the
    block ends. `base`: the adapters' base model. Collective; rank 0 writes."""
    with replacing(target) if rank == 0 else nullcontext(target) as folder:
        model.bridge.save_hf_adapter(
            model.chunks, folder, peft_config=model.lora, base_model_name_or_path=base, show_progress=False
        )
        if rank == 0:
            load_tokenizer(source).save_pretrained(folder)
        yield


def convert(
    config: Config,
    model_path: Path,
    saved: Path,
    target: Path,
    say: Callable[[str], None],
    shard_bytes: int = SHARD_BYTES,
) -> float:
    """Convert a checkpoint's policy folder `saved` to Hugging Face format in `target`, and LoRA's adapters to
    `adapter_folder(target)`, without Ray.

    Returns the mean difference, in nats, of a sequence's logprobs between transformers with the new folder and
    megatron-core. `model_path`: the run's starting model. The environment has RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, for one rank.

    Holds a shard, a layer, the embedding and the LM head. On a GPU, transformers uses all free memory.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the difference exceeds `PROBE_TOLERANCE`.
    """
    on_gpu = torch.cuda.is_available()
    policy = _in_one_process(config.policy)
    say(f"building the model on {'a GPU' if on_gpu else 'the CPU'}")
    limit_s, seed = config.cluster.collective_timeout_s, config.algorithm.seed
    model = build_model(policy, str(model_path), on_gpu, limit_s, seed, trains=False, on_meta=True)
    vocabulary, generator = model.bridge.hf_pretrained.config.vocab_size, torch.Generator().manual_seed(0)
    tokens_1T = torch.randint(vocabulary, (1, _PROBE_TOKENS), generator=generator)
    with ExitStack() as stack:
        if model.lora is not None:
            PolicyState(model, None, None).load_weights(saved)
            base = base_name(policy.model_name, model_path)
            stack.enter_context(exported_adapters(model, 0, base, model_path, adapter_folder(target)))
        folder = stack.enter_context(replacing(target))
        say("reading the checkpoint, and writing the folder")
        writer = ShardWriter(folder, shard_bytes)
        _stream(model, saved, writer.add)
        lengths_1 = torch.tensor([tokens_1T.shape[1]])
        scored = forward_scores(model, tokens_1T, lengths_1, Layout.configured(policy, "logprob", on_gpu), 1.0)
        if scored is None:
            raise RuntimeError("a single process has logits")
        writer.close()
        complete_hf_folder(folder, model_path, writer.dtype)
        say("reading the folder back")
        own_1T = _logprobs_of_folder(folder, tokens_1T, model.device)
        difference = (own_1T - scored["logprobs"]).abs().mean().item()
        tolerance = PROBE_TOLERANCE[config.policy.precision]
        if not difference <= tolerance:
            raise CheckpointError(
                f"{folder} gives a probe logprobs that differ from the checkpoint's by {difference:.4f} nats on "
                f"average (limit {tolerance:g} in {config.policy.precision}), so {target} was not written"
            )
    return difference


def _stream(model: MegatronModel, saved: Path, write: Callable[[str, Tensor], None]) -> None:
    """Prepare a model on the meta device for one forward pass, in which each layer has weights only while it runs.

    `write` gets the exported tensors of each layer in that pass, and those outside of the layers before. Weights are
    the checkpoint's in `saved`; with LoRA the starting model's, and the adapters that the model has.
    """
    from megatron.core.utils import unwrap_model

    (bare,) = unwrap_model(model.chunks)
    weights, tasks = Weights(model), defaultdict[str, list[Any]](list)
    for task in weights.tasks():
        tasks[_part_of(task.param_name)].append(task)
    stored = SavedWeights(bare, saved, model.device) if model.lora is None else None

    def conversions(part: str) -> list[Any]:
        """Return the part's conversion tasks with its current weights."""
        own = [(task, task.param_name.rpartition(".")[2]) for task in tasks[part]]
        return [replace(task, param_weight=getattr(task.megatron_module, name)) for task, name in own]

    def fill(part: str, *_: Any) -> None:
        if stored is not None:
            state = stored.read(lambda name: _part_of(name) == part)
            bare.load_state_dict(state, strict=False, assign=True)
        else:
            for name, parameter in list(bare.named_parameters()):
                if parameter.is_meta and _part_of(name) == part:
                    module, _, own = name.rpartition(".")
                    empty = torch.empty_like(parameter, device=model.device)
                    setattr(bare.get_submodule(module), own, torch.nn.Parameter(empty, parameter.requires_grad))
            load_weights(model.bridge, model.chunks, conversions(part))

    def export(part: str, layer: Any, *_: Any) -> None:
        for name, tensor in weights.export(conversions(part)):
            write(name, tensor)
        layer.to("meta")

    fill("")
    for name, tensor in weights.export(conversions("")):
        write(name, tensor)
    for index, layer in enumerate(bare.decoder.layers):
        part = f"decoder.layers.{index}."
        layer.register_forward_pre_hook(partial(fill, part))
        layer.register_forward_hook(partial(export, part))


def _part_of(name: str) -> str:
    """Return the path of a parameter's layer; "" outside of the layers."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def _in_one_process(policy: PolicyConfig) -> PolicyConfig:
    parallel = replace(
        policy.megatron_cfg,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        sequence_parallel=False,
        fp8_cfg=replace(policy.megatron_cfg.fp8_cfg, enabled=False),
        fine_grained_activation_offloading=False,
    )
    return replace(policy, megatron_cfg=parallel)


def _logprobs_of_folder(folder: Path, tokens_1T: Tensor, device: torch.device) -> Tensor:
    """Return logprobs from transformers in the dtype of config.json; entry t is of token t, entry 0 is 0."""
    from transformers import AutoModelForCausalLM

    places: Any = "auto" if device.type == "cuda" else _on_disk(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent) as offloaded, torch.no_grad():
        options: Any = {"dtype": "auto", "device_map": places, "offload_folder": offloaded}
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        logits = model(tokens_1T.to(device)).logits.float().cpu()
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, tokens_1T[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0))


def _on_disk(folder: Path) -> dict[str, str]:
    """Return a device map with which the layers' parameters are in memory only while they run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    body = model.base_model_prefix
    modules = {f"{body}.{name}": module for name, module in model.base_model.named_children()}
    modules |= {name: module for name, module in model.named_children() if name != body}
    # Hooks of accelerate do not know tied weights that are on disk.
    kept = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name: "cpu" if module in kept else "disk" for name, module in modules.items()}
