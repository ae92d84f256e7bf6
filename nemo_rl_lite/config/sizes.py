"""Derived sizes of a configuration: ranks, engines, replicas, samples, and values of `auto`.

Parallel sizes are multiplied only here. `auto` has a provisional value until `planning.automatic.resolve_auto` resolves
it at the start of a run. Imports nothing heavy.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import lcm
from typing import Any, Literal

from nemo_rl_lite.config.algorithms import algorithm_of, generates
from nemo_rl_lite.config.schema import (
    Config,
    DynamicBatchingConfig,
    GenerationConfig,
    LoraConfig,
    LoraTarget,
    MegatronConfig,
    OffloadedComponent,
    PolicyConfig,
    RecomputeModule,
    RefitConfig,
    SequencePackingConfig,
)
from nemo_rl_lite.config.schema_algorithm import DistillationConfig, GRPOConfig, RolloutAlgorithmConfig
from nemo_rl_lite.config.sources import source_configs

# A micro-batch of this many tokens keeps a GPU busy, except for small models, whose kernel launches take longest.
ENOUGH_TOKENS = 16384
# Memory share of an engine on a non-colocated and on a colocated GPU.
SHARE_APART, SHARE_COLOCATED = 0.9, 0.5
# The policy computes the logits of this many entries of the vocabulary at a time.
VOCABULARY_SLICE = 8192
# FP8 scales are of blocks of this many tokens.
FP8_BLOCK = 128
# Share of a batch's tokens that shared prompts must save, with `auto`.
LEAST_SAVED = 0.05
# Samples of a prompt with this many tokens go to one engine. It may then have this many more requests than another.
LONG_PROMPT, TOGETHER = 512, 8
BatchMode = Literal["fixed", "dynamic", "packed"]


def token_limits(
    policy: PolicyConfig, mode: Literal["packed", "dynamic"]
) -> SequencePackingConfig | DynamicBatchingConfig:
    """Return the section with the token limits of packed or dynamic batches."""
    return policy.sequence_packing if mode == "packed" else policy.dynamic_batching


def mb_tokens(policy: PolicyConfig, mode: Literal["packed", "dynamic"], training: bool) -> int:
    """Return the maximum number of tokens per micro-batch of training, or of logprob passes."""
    limits = token_limits(policy, mode)
    limit = limits.train_mb_tokens if training else limits.logprob_mb_tokens
    return max(enough_tokens(policy), policy.max_total_sequence_length) if limit == "auto" else limit


def enough_tokens(policy: PolicyConfig) -> int:
    """Return the tokens per micro-batch that keep its GPUs busy."""
    return ENOUGH_TOKENS * policy.megatron_cfg.context_parallel_size


def linear_layers(latent: bool = False, compresses_queries: bool = False) -> list[LoraTarget]:
    """Return Megatron's names of the linear layers of attention, which may be `latent`, and of the MLP last."""
    others: list[LoraTarget] = ["linear_proj", "linear_fc1", "linear_fc2"]
    if not latent:
        return ["linear_qkv", *others]
    queries: list[LoraTarget] = ["linear_q_down_proj", "linear_q_up_proj"] if compresses_queries else ["linear_q_proj"]
    return [*queries, "linear_kv_down_proj", "linear_kv_up_proj", *others]


def adapted_layers(peft: LoraConfig, layers: list[LoraTarget]) -> list[LoraTarget]:
    """Return which of a model's linear `layers` get adapters: all if none are given, or megatron-bridge's default."""
    given = peft.target_modules
    return layers if not given or set(given) == set(linear_layers()) else given


def keeps_logits(policy: PolicyConfig) -> bool:
    """Return whether logits are kept for the backward pass; False while `auto` is unresolved."""
    return policy.megatron_cfg.keep_logits is True


def model_chunks(parallel: MegatronConfig) -> int:
    """Return the model chunks per pipeline stage; several are interleaved."""
    return (parallel.virtual_pipeline_model_parallel_size or 1) if parallel.pipeline_model_parallel_size > 1 else 1


def adds_in_gemms(parallel: MegatronConfig, on_gpu: bool) -> bool:
    """Return whether GEMMs add gradients of weights to their sums. LoRA's adapters are layers that need Apex for it."""
    return on_gpu and parallel.gradient_accumulation_fusion and not parallel.peft.enabled


def recomputed_modules(parallel: MegatronConfig) -> Sequence[RecomputeModule]:
    """Return the parts of layers that selective recomputation recomputes; none without it."""
    selective = parallel.activation_checkpointing and parallel.recompute_granularity == "selective"
    return (parallel.recompute_modules or ["core_attn"]) if selective else []


def leaving_for_generation(policy: PolicyConfig) -> Sequence[OffloadedComponent]:
    """Return the components to offload while engines generate; none while `auto` is unresolved."""
    return [] if policy.offload_for_generation == "auto" else policy.offload_for_generation


def engine_share(generation: GenerationConfig) -> float:
    """Return an engine's share of GPU memory."""
    share = generation.vllm_cfg.gpu_memory_utilization
    unresolved = SHARE_COLOCATED if generation.colocated.enabled else SHARE_APART
    return unresolved if share == "auto" else share


def bucket_size(refit: RefitConfig, memory_bytes: int) -> int:
    """Return the bytes of a refit's bucket: as configured, or a share of GPU memory, at most 5 GiB."""
    share = max(1, min(int(memory_bytes * refit.buffer_memory_ratio), 5 * 2**30))
    return share if refit.bucket_bytes is None else refit.bucket_bytes


def generates_ahead(config: Config) -> bool:
    """Return whether engines begin rollouts before the step that trains on them."""
    return isinstance(config.algorithm, GRPOConfig) and config.algorithm.rollouts.source != "on_policy"


def sleep_is_wanted(config: Config) -> bool:
    """Return whether colocated engines sleep. With unresolved `auto` they do unless rollouts are asynchronous."""
    sleep = config.generation.colocated.sleep
    return not generates_ahead(config) if sleep == "auto" else sleep


def engines_may_sleep(config: Config) -> bool:
    """Return whether engines need not generate while the policy trains: rollouts are synchronous, or unfinished
    responses continue with new weights."""
    if not isinstance(config.algorithm, GRPOConfig):
        return True
    rollouts = config.algorithm.rollouts
    return rollouts.source == "on_policy" or (rollouts.source == "queue" and rollouts.in_flight_weight_updates)


def rollouts_in_flight(config: Config) -> int:
    """Return for how many steps engines generate at a time. With one, a rollout's longest response runs alone."""
    if not isinstance(config.algorithm, GRPOConfig):
        return 1
    rollouts = config.algorithm.rollouts
    in_flight = rollouts.source == "queue" and rollouts.in_flight_weight_updates
    return rollouts.max_trajectory_age_steps + 1 if in_flight else 1


def keeps_partial_rollouts(config: Config) -> bool:
    """Return whether the engines of a queue stop while the policy trains, and continue unfinished responses after the
    refit (partial rollouts)."""
    queues = isinstance(config.algorithm, GRPOConfig) and config.algorithm.rollouts.source == "queue"
    return queues and config.generation.colocated.enabled and sleep_is_wanted(config)


@dataclass(frozen=True)
class ParallelDims:
    """Parallel layout of a policy: tensor, pipeline, context and expert parallel sizes, and the number of ranks.

    Ranks are in Megatron Core's order: tensor, context, data, pipeline parallel, fastest first. Expert parallelism
    spreads experts over the ranks of a pipeline stage. Only expert tensor parallelism splits single experts.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    world: int
    first_layers: int | None = None
    """Layers of the first pipeline stage; None for an equal share."""
    last_layers: int | None = None
    etp: int = 1
    """Expert tensor parallel size."""
    chunks: int = 1
    """Model chunks per pipeline stage (virtual pipeline)."""

    @classmethod
    def of(cls, parallel: MegatronConfig, world: int) -> "ParallelDims":
        """Split `world` ranks."""
        return cls(
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
            world=world,
            first_layers=parallel.num_layers_in_first_pipeline_stage,
            last_layers=parallel.num_layers_in_last_pipeline_stage,
            etp=parallel.expert_tensor_parallel_size,
            chunks=model_chunks(parallel),
        )

    @property
    def replica(self) -> int:
        """Ranks per model replica, apart from experts."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Data-parallel size; 0 if there are too few ranks for one replica."""
        return self.world // self.replica

    @property
    def dense_dp(self) -> int:
        """Data-parallel x context-parallel size, over which gradients are averaged, apart from experts; at least 1."""
        return max(1, self.dp * self.cp)

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of experts; at least 1."""
        return max(1, self.stage // (self.ep * self.etp))

    @property
    def fills_world(self) -> bool:
        """True if replicas use all ranks."""
        return self.world > 0 and self.world % self.replica == 0

    @property
    def splits_weights(self) -> bool:
        """True if a rank has only a part of the weights. Context parallelism splits none."""
        return self.tp * self.pp * self.ep * self.etp > 1

    @property
    def neighbours(self) -> int:
        """Consecutive ranks that together have all weights of a stage."""
        return max(self.tp, self.ep * self.etp)

    def ranks_of_stage(self, stage: int) -> range:
        """Return the ranks of pipeline stage `stage`, from 0."""
        return range(stage * self.stage, (stage + 1) * self.stage)

    def stage_layers(self, layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage. Raises ValueError: they cannot be spread evenly."""
        if self.pp == 1:
            return [layers]
        told = {stage: count for stage, count in ((0, self.first_layers), (self.pp - 1, self.last_layers)) if count}
        rest, others = layers - sum(told.values()), self.pp - len(told)
        if rest < others or (rest % others if others else rest):
            raise ValueError(f"{layers} layers cannot be spread over {self.pp} pipeline stages")
        return [told[stage] if stage in told else rest // others for stage in range(self.pp)]

    def stage_spans(self, layers: int) -> list[list[range]]:
        """Return the layers of each model chunk of each pipeline stage. The first chunks of all stages come first."""
        spans, begin = [[] for _ in range(self.pp)], 0
        for _ in range(self.chunks):
            for own, count in zip(spans, self.stage_layers(layers), strict=True):
                own.append(range(begin, begin + count // self.chunks))
                begin = own[-1].stop
        return spans

    def chunks_in_flight(self, stage: int) -> int:
        """Return the largest number of micro-batches that wait for their backward pass, counted once per model chunk
        of a pipeline stage."""
        later = self.pp - stage - 1
        return later + 1 if self.chunks == 1 else 2 * later + (self.chunks - 1) * self.pp + 1

    def stage_and_replica(self, rank: int) -> tuple[int, int]:
        """Return the pipeline stage and the data-parallel replica of a rank."""
        return rank // self.stage, rank // (self.tp * self.cp) % self.dp


def as_teacher(config: Config) -> Config:
    """Return the configuration with the teacher as a policy that is not trained. Call it only if there is one."""
    policy, teacher = config.policy, config.teacher
    limit: dict[str, Any] = {"logprob_mb_tokens": teacher.logprob_mb_tokens}
    own = replace(
        policy,
        model_name=teacher.model_name or "",
        precision=teacher.precision,
        logprob_batch_size=teacher.logprob_batch_size,
        sequence_packing=replace(policy.sequence_packing, **limit),
        dynamic_batching=replace(policy.dynamic_batching, **limit),
        router_replay=replace(policy.router_replay, enabled=False),
        megatron_cfg=replace(
            policy.megatron_cfg,
            **asdict(teacher.megatron_cfg),
            peft=replace(policy.megatron_cfg.peft, enabled=False),
            freeze_moe_router=False,
            moe_router_bias_update_rate=0.0,
            moe_router_fusion=False,
            activation_checkpointing=False,
            virtual_pipeline_model_parallel_size=None,
            expert_tensor_parallel_size=1,
            moe_token_dispatcher_type="alltoall",
            fp8_cfg=replace(policy.megatron_cfg.fp8_cfg, enabled=False),
            model_overrides={},
            fine_grained_activation_offloading=False,
            cuda_graph_impl="none",
            keep_logits=False,
        ),
    )
    return replace(config, policy=own)


def teacher_topk(config: Config) -> int | None:
    """Return the number of teacher logits per token in the loss; None for sampled tokens only."""
    return config.options(DistillationConfig).topk_logits_k


def on_gpus(config: Config) -> bool:
    return config.cluster.gpus_per_node > 0


def spans_hosts(config: Config) -> bool:
    """Return whether replicas that exchange gradients are on several hosts."""
    dims, a_node = parallel_dims(config), config.cluster.gpus_per_node
    if not on_gpus(config):
        a_node = max(1, config.cluster.cpu_ranks // config.cluster.num_nodes)
    return dims.dense_dp > 1 and dims.stage > a_node


def with_overlap(config: Config) -> Config:
    """Replace `auto` of overlapped communication between replicas: it overlaps if they are on several hosts."""
    parallel = config.policy.megatron_cfg
    options, sharded = parallel.distributed_data_parallel_config, parallel.optimizer.use_distributed_optimizer
    reduces, gathers = options.overlap_grad_reduce, options.overlap_param_gather
    useful = spans_hosts(config) and not records_training(config)
    if reduces == "auto":
        reduces = gathers is True or useful
    if gathers == "auto":
        gathers = reduces and sharded and useful
    own = replace(options, overlap_grad_reduce=reduces, overlap_param_gather=gathers)
    return replace(
        config, policy=replace(config.policy, megatron_cfg=replace(parallel, distributed_data_parallel_config=own))
    )


def records_training(config: Config) -> bool:
    """Return whether training passes are captured as CUDA graphs."""
    return on_gpus(config) and config.policy.megatron_cfg.cuda_graph_impl != "none"


def validates(config: Config) -> bool:
    """Return whether the run validates at all."""
    options, last = config.algorithm, config.algorithm.max_num_steps
    periodic = options.val_period > 0 and (last is None or options.val_period <= last)
    return options.val_at_start or options.val_at_end or periodic


def has_endpoint(config: Config) -> bool:
    """Return whether the engines also answer over HTTP."""
    return config.generation.serve.enabled or has_agent(config)


def has_agent(config: Config) -> bool:
    """Return whether an agent plays the episodes of a source."""
    return any(one.agent.name is not None for one in source_configs(config).values())


def all_gpus(config: Config) -> int:
    return config.cluster.num_nodes * config.cluster.gpus_per_node


def generation_gpus(config: Config) -> int:
    """Return the number of GPUs of the engines: all if colocated, half of the nodes or GPUs by default; 0 on CPUs."""
    if not on_gpus(config) or config.generation.colocated.enabled:
        return all_gpus(config)
    resources, nodes = config.generation.colocated.resources, config.cluster.num_nodes
    if resources.num_nodes is not None:
        return resources.num_nodes * config.cluster.gpus_per_node
    if resources.gpus_per_node is not None:
        return resources.gpus_per_node
    return nodes // 2 * config.cluster.gpus_per_node if nodes > 1 else config.cluster.gpus_per_node // 2


def policy_ranks(config: Config) -> int:
    """Return the number of policy ranks: one per GPU without a non-colocated engine, or `cluster.cpu_ranks`."""
    if not on_gpus(config):
        return config.cluster.cpu_ranks
    shared = config.generation.colocated.enabled or not generates(config)
    return all_gpus(config) - (0 if shared else generation_gpus(config))


def engines(config: Config) -> int:
    """Return the number of engines: as many as the GPUs allow, or `generation.data_parallel_size` on CPUs."""
    if not on_gpus(config):
        return config.generation.data_parallel_size or 1
    return generation_gpus(config) // engine_ranks(config)


def samples_together(config: Config, prompt: float) -> float:
    """Return how many samples of a prompt with this number of tokens an engine has, if it has room for all."""
    samples, count = config.options(RolloutAlgorithmConfig).num_generations_per_prompt, engines(config)
    if count == 1:
        return samples
    return min(samples, TOGETHER) if prompt >= LONG_PROMPT else max(1.0, samples / count)


def least_engines(config: Config) -> int:
    """Return the number of engines with which a run starts and continues. Engines on the policy's devices all must."""
    least, whole = config.generation.min_engines, engines(config)
    return whole if least is None or config.generation.colocated.enabled else least


def rollout_workers(config: Config) -> int:
    """Return the number of rollout workers, at most one for each engine; 0 if the launcher plays the episodes."""
    if not isinstance(config.algorithm, GRPOConfig):
        return 0
    count = config.algorithm.rollouts.num_workers
    if count != "auto":
        return min(count, engines(config))
    if config.generation.serve.enabled:
        # Clients reach the launcher's node.
        return 0
    nodes = config.cluster.num_nodes
    if on_gpus(config):
        nodes = -(-generation_gpus(config) // config.cluster.gpus_per_node)
    return min(nodes, engines(config)) if nodes > 1 and engines(config) > 1 else 0


def saves_unfinished(config: Config) -> bool:
    """Return whether checkpoints have the episodes that are unfinished."""
    if not isinstance(config.algorithm, GRPOConfig):
        return False
    rollouts = config.algorithm.rollouts
    return rollouts.source == "queue" and rollouts.in_flight_weight_updates and rollouts.checkpoint_inflight


def engine_capacity(config: Config) -> int:
    """Return the number of requests with which an engine begins no further responses to train on.

    With partial rollouts this is its share of one rollout. More would not decode faster than a synchronous step, and
    tokens of later steps would be more stale. Dynamic sampling needs more.
    """
    most = config.generation.vllm_cfg.max_num_seqs
    if not keeps_partial_rollouts(config) or config.options(GRPOConfig).use_dynamic_sampling:
        return most
    return min(most, -(-samples_per_step(config) // engines(config)))


def engine_ranks(config: Config) -> int:
    """Return the processes per engine, one per GPU."""
    settings = config.generation.vllm_cfg
    return settings.tensor_parallel_size * settings.pipeline_parallel_size if on_gpus(config) else 1


def engine_hosts(config: Config) -> int:
    """Return the nodes per engine."""
    return -(-engine_ranks(config) // max(1, config.cluster.gpus_per_node))


def parallel_dims(config: Config) -> ParallelDims:
    """Return the policy's parallel layout."""
    return ParallelDims.of(config.policy.megatron_cfg, policy_ranks(config))


def batch_mode(policy: PolicyConfig, on_gpu: bool) -> BatchMode:
    """Return the kind of micro-batches. `auto` packs on GPUs in bfloat16, which Transformer Engine needs."""
    packs = policy.sequence_packing.enabled
    if packs == "auto":
        packs = on_gpu and policy.precision == "bfloat16" and not policy.dynamic_batching.enabled
    return "packed" if packs else "dynamic" if policy.dynamic_batching.enabled else "fixed"


def shares_prompts(policy: PolicyConfig, on_gpu: bool) -> bool:
    """Return whether packed rows may share prompts: without context parallelism and CUDA graphs."""
    parallel = policy.megatron_cfg
    plain = parallel.context_parallel_size == 1 and not (on_gpu and parallel.cuda_graph_impl != "none")
    return plain and policy.sequence_packing.shared_prompts is not False and batch_mode(policy, on_gpu) == "packed"


def makes_inputs_at_once(policy: PolicyConfig, on_gpu: bool) -> bool:
    """Return whether attention layers make queries, keys and values of packed rows in one kernel, where they can.

    Offloaded activations are found by their module, and CUDA graphs need rotations that each pass computes.
    """
    parallel = policy.megatron_cfg
    plain = parallel.context_parallel_size == 1 and not parallel.fine_grained_activation_offloading
    return on_gpu and plain and parallel.cuda_graph_impl == "none" and batch_mode(policy, on_gpu) == "packed"


def prompt_siblings(config: Config) -> int:
    """Return the number of neighbouring rows whose prompt packs may share; 1 if they share none."""
    parallel = config.policy.megatron_cfg
    # Settings with which `policy/shared_prompts.py` shares none.
    excluded = parallel.fine_grained_activation_offloading or parallel.moe_router_bias_update_rate > 0
    shares = isinstance(config.algorithm, RolloutAlgorithmConfig) and shares_prompts(config.policy, on_gpus(config))
    shares &= not excluded
    return config.options(RolloutAlgorithmConfig).num_generations_per_prompt if shares else 1


def needs_equal_counts(config: Config) -> bool:
    """Return whether replicas get equally many sequences.

    Fixed micro-batches then have one shape. Biases of routers count tokens, and those of unequal replicas' fillers too.
    """
    counts_tokens = config.policy.megatron_cfg.moe_router_bias_update_rate > 0
    return counts_tokens or batch_mode(config.policy, on_gpus(config)) == "fixed"


def least_saved(policy: PolicyConfig) -> float:
    """Return the share of a batch's tokens above which prompts are shared."""
    return LEAST_SAVED if policy.sequence_packing.shared_prompts == "auto" else 0.0


def row_round(policy: PolicyConfig, context: int) -> int:
    """Return the number of tokens to round rows of `context` context-parallel ranks up to. A rank's share is a multiple
    of `sequence_length_round` and has two equal halves. FP8 needs blocks on each rank."""
    parallel, own = policy.megatron_cfg, policy.sequence_length_round
    if parallel.fp8_cfg.enabled:
        own = lcm(own, FP8_BLOCK * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1))
    return own if context == 1 else context * lcm(own, 2)


def sequences_together(config: Config) -> int:
    """Return the number of neighbouring sequences that the loss compares: 2 for preference pairs."""
    return algorithm_of(config).sequences_together


def sequences_per_optimizer_step(config: Config) -> int:
    return config.policy.train_global_batch_size * sequences_together(config)


def micro_batch_sizes(config: Config) -> tuple[int, int]:
    """Return the sequences (or pairs) per fixed micro-batch of training, and the sequences per logprob micro-batch.

    A rank uses the largest number up to `train_micro_batch_size` that divides its share. Equal keys give equal sizes,
    so the importance ratios of a fresh rollout are exactly 1."""
    policy, ranks = config.policy, max(1, parallel_dims(config).dp)
    share = max(1, policy.train_global_batch_size // ranks)
    most = min(policy.train_micro_batch_size, share)
    training = next(size for size in range(most, 0, -1) if share % size == 0)
    if policy.logprob_batch_size == policy.train_micro_batch_size:
        return training, training
    return training, policy.logprob_batch_size


def samples_per_step(config: Config) -> int:
    """Return the sequences of a rollout."""
    options = config.options(RolloutAlgorithmConfig)
    return options.num_prompts_per_step * options.num_generations_per_prompt


def iterations(config: Config) -> int:
    """Return the training passes over a batch: several only over rollouts."""
    return config.algorithm.num_iterations if isinstance(config.algorithm, GRPOConfig) else 1


def optimizer_steps(config: Config) -> int:
    """Return the optimizer steps on a rollout, in all training passes over it."""
    return iterations(config) * (samples_per_step(config) // sequences_per_optimizer_step(config))


def repeats_first_pass(config: Config) -> bool:
    """Return whether the first optimizer step needs a separate pass for previous logprobs. All training passes over a
    rollout compare with the weights before the first one."""
    return config.options(GRPOConfig).loss_fn.force_on_policy_ratio is False or iterations(config) > 1


def previous_passes(config: Config) -> float:
    """Return the fraction of a rollout that needs a separate pass for previous logprobs."""
    return 1.0 if repeats_first_pass(config) else 1 - 1 / optimizer_steps(config)
