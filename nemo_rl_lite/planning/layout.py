"""Describe the layout of ranks and the splitting of batches, from the configuration alone."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import (
    batch_mode,
    engine_ranks,
    engines,
    generation_gpus,
    on_gpus,
    parallel_dims,
    samples_per_step,
    sequences_per_optimizer_step,
    sequences_together,
)
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.activation_size import micro_batch
from nemo_rl_lite.planning.prediction import token_cache_bytes

Row = tuple[str, str]


def parallel_rows(config: Config, shape: ModelShape) -> Iterator[Row]:
    """Yield rows about the policy's ranks, the layers of each stage, and the engines."""
    dims = parallel_dims(config)
    context = f"context {dims.cp} x " if dims.cp > 1 else ""
    sizes = f"tensor {dims.tp} x pipeline {dims.pp} x {context}data {dims.dp}"
    if shape.experts:
        sizes += f", experts over {dims.ep}"
    yield "policy", f"{dims.world} rank{'s' * (dims.world > 1)}: {sizes}"
    counts = dims.stage_layers(shape.layers)
    for stage, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True) if dims.pp > 1 else ()):
        ends = [name for name, there in (("embedding", stage == 0), ("output", stage == dims.pp - 1)) if there]
        own = f"layers {end - count} to {end - 1}"
        yield f"stage {stage}", f"{', '.join([own, *ends])}: rank{_span(dims.ranks_of_stage(stage))}"
    if not generates(config):
        return
    count, wide = engines(config), engine_ranks(config)
    where = "on the policy's GPUs" if config.generation.colocated.enabled else "on GPUs of their own"
    where = where if on_gpus(config) else "on CPUs"
    yield "engines", f"{count} of {config.generation.backend}, tensor {wide}, {where}"


def rank_rows(config: Config) -> Iterator[list[str]]:
    """Yield node, GPUs, and what runs on them; neighbours with the same stage, replica and engine share a row."""
    dims, a_node = parallel_dims(config), config.cluster.gpus_per_node
    wide, shared = config.generation.vllm_cfg.tensor_parallel_size, config.generation.colocated.enabled
    generating = generation_gpus(config) if generates(config) else 0
    first = 0 if shared else dims.world

    def holds(gpu: int) -> tuple[int, str, str]:
        policy = engine = "-"
        if gpu < dims.world:
            stage, replica = dims.stage_and_replica(gpu)
            policy = f"stage {stage}, replica {replica}"
        if first <= gpu < first + generating:
            engine = f"engine {(gpu - first) // wide}"
        return gpu // a_node, policy, engine

    for (node, policy, engine), gpus in groupby(range(config.cluster.num_nodes * a_node), holds):
        yield [f"node {node}", f"GPU{_span([gpu % a_node for gpu in gpus])}", policy, engine]


def batch_rows(config: Config, kv_bytes: int, shape: ModelShape) -> Iterator[Row]:
    """Yield rows from a step's samples to a rank's micro-batches. `kv_bytes`: the KV cache on an engine's GPU; 0 if
    unknown."""
    policy, replicas = config.policy, parallel_dims(config).dp
    batch, longest = sequences_per_optimizer_step(config), policy.max_total_sequence_length
    if generates(config):
        options, samples, each = config.options(RolloutAlgorithmConfig), samples_per_step(config), engines(config)
        prompts, answers = options.num_prompts_per_step, options.num_generations_per_prompt
        steps = f"{samples // batch} optimizer step{'s' * (samples > batch)}"
        yield "a step", f"{prompts} prompts x {answers} answers = {samples} samples, {steps}"
        limit = config.generation.vllm_cfg.max_num_seqs
        tokens, held = config.generation.max_new_tokens, _kv(config, kv_bytes, shape)
        yield (
            "an engine",
            f"{-(-samples // each)} samples of at most {tokens} tokens a turn, at most {limit} at a time{held}",
        )
    pairs = " (pairs count twice)" if sequences_together(config) > 1 else ""
    yield (
        "an optimizer step",
        f"{batch} sequences{pairs} of at most {longest} tokens, {-(-batch // replicas)} a replica",
    )
    tokens, mode = micro_batch(config, training=True), batch_mode(policy, on_gpus(config))
    together, share = sequences_together(config), -(-batch // replicas)
    count = -(-share // (together * max(1, tokens.tokens // (together * longest))))
    kind = {"packed": "packed into one row", "dynamic": "padded, of like length", "fixed": "padded"}[mode]
    ranks = parallel_dims(config).cp
    split = f", which {ranks} context-parallel ranks share" if ranks > 1 else ""
    yield "a micro-batch", f"at most {tokens.tokens} tokens, {kind}{split}; at most {count} a rank and optimizer step"


def _kv(config: Config, kv_bytes: int, shape: ModelShape) -> str:
    if not kv_bytes or not on_gpus(config):
        return ""
    room = kv_bytes // (token_cache_bytes(config, shape) * config.policy.max_total_sequence_length)
    return f"; its KV cache holds {room} of the longest"


def _span(numbers: Sequence[int]) -> str:
    """` 3` or `s 0-3`."""
    return f" {numbers[0]}" if len(numbers) == 1 else f"s {numbers[0]}-{numbers[-1]}"
