"""Rules about ranks, and the parallel groups that they fill."""

from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import all_gpus, batch_mode, generation_gpus, on_gpus, parallel_dims
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule

CLUSTER = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    "cluster.cpu_ranks",
    "generation.colocated",
)
PARALLEL = (
    *CLUSTER,
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage",
    "policy.megatron_cfg.context_parallel_size",
)
BATCHING = ("policy.precision", "policy.sequence_packing", "policy.dynamic_batching")
MEGATRON = "policy.megatron_cfg"


@rule("cluster.num_nodes", "cluster.gpus_per_node", "cluster.cpu_ranks")
def cpu_ranks_fill_nodes(config: Config) -> Iterator[Violation]:
    nodes, ranks = config.cluster.num_nodes, config.cluster.cpu_ranks
    if not on_gpus(config) and ranks % nodes:
        fix = f"cluster.cpu_ranks={-(-ranks // nodes) * nodes}, or cluster.num_nodes=1"
        yield Violation("cluster.cpu_ranks", ranks, f"must be a multiple of the {nodes} nodes (cluster.num_nodes)", fix)


@rule(*CLUSTER, "policy.precision")
def gpus_compute_in_bfloat16(config: Config) -> Iterator[Violation]:
    if on_gpus(config) and config.policy.precision == "float32":
        fix = "policy=megatron_gpu generation=vllm_gpu, or policy.precision=bfloat16"
        yield Violation("policy.precision", "float32", "is for CPUs: GPU kernels round it or do not take it", fix)


@rule(*CLUSTER, options=RolloutAlgorithmConfig)
def generation_has_gpus(config: Config) -> Iterator[Violation]:
    if not on_gpus(config) or config.generation.colocated.enabled:
        return
    prefix, resources = "generation.colocated.resources", config.generation.colocated.resources
    gpus, total = generation_gpus(config), all_gpus(config)
    if resources.num_nodes is not None and resources.gpus_per_node not in (None, config.cluster.gpus_per_node):
        rule_text = "whole nodes are set apart, or GPUs of one node, not both"
        yield Violation(f"{prefix}.gpus_per_node", resources.gpus_per_node, rule_text, f"{prefix}.gpus_per_node=null")
    elif not 0 < gpus < total:
        name = "num_nodes" if resources.num_nodes is not None else "gpus_per_node"
        rule_text = f"sets {gpus} of the run's {total} GPUs apart for generation; at least one must, and one must stay"
        fix = f"{prefix}.gpus_per_node=1" if total > 1 else "generation.colocated.enabled=true"
        yield Violation(f"{prefix}.{name}", getattr(resources, name), rule_text, fix)


@rule(*PARALLEL, f"{MEGATRON}.expert_model_parallel_size")
def ranks_fill_parallel_groups(config: Config) -> Iterator[Violation]:
    dims = parallel_dims(config)
    # Without a rank, the rule above has spoken.
    if dims.world and not dims.fills_world:
        more = "more GPUs" if on_gpus(config) else f"cluster.cpu_ranks={dims.replica}"
        sizes = f"tensor ({dims.tp}) x pipeline ({dims.pp})" + (f" x context ({dims.cp})" if dims.cp > 1 else "")
        only_context = dims.cp > 1 and dims.tp * dims.pp == 1
        yield Violation(
            f"{MEGATRON}.{'context_parallel_size' if only_context else 'tensor_model_parallel_size'}",
            dims.cp if only_context else dims.tp,
            f"{sizes} parallel size must divide the {dims.world} policy ranks",
            f"{more}, or smaller parallel sizes",
        )
    elif dims.stage % dims.ep:
        key = f"{MEGATRON}.expert_model_parallel_size"
        yield Violation(key, dims.ep, f"must divide the {dims.stage} ranks of a pipeline stage", f"{key}=1")


@rule(
    *CLUSTER,
    f"{MEGATRON}.sequence_parallel",
    f"{MEGATRON}.tensor_model_parallel_size",
    f"{MEGATRON}.expert_model_parallel_size",
)
def gpu_only_layouts(config: Config) -> Iterator[Violation]:
    parallel = config.policy.megatron_cfg
    if parallel.sequence_parallel and not on_gpus(config):
        key = f"{MEGATRON}.sequence_parallel"
        yield Violation(key, True, "megatron-core's norms on a CPU do not split sequences", f"{key}=false")
    elif parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        key = f"{MEGATRON}.sequence_parallel"
        yield Violation(key, True, "splits over tensor-parallel ranks, and there is one", f"{key}=false")


@rule(*CLUSTER, *BATCHING, f"{MEGATRON}.context_parallel_size")
def sequences_can_be_shared(config: Config) -> Iterator[Violation]:
    size, key = config.policy.megatron_cfg.context_parallel_size, f"{MEGATRON}.context_parallel_size"
    if size == 1:
        return
    if not on_gpus(config):
        rule_text = "needs Transformer Engine's attention, which runs on GPUs"
        yield Violation(key, size, rule_text, f"{key}=1, or cluster.gpus_per_node={size} on a machine with GPUs")
    elif batch_mode(config.policy, on_gpu=True) != "packed":
        rule_text = "splits packed sequences only, and policy.sequence_packing is off"
        fix = "policy.sequence_packing.enabled=true policy.dynamic_batching.enabled=false policy.precision=bfloat16"
        yield Violation(key, size, rule_text, f"{fix}, or {key}=1")
