"""Rules about CUDA graphs of the training pass."""

from collections.abc import Iterator

from nemo_rl_lite.config.automatic import leaving_for_generation
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import batch_mode, on_gpus, records_training
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.shape import NoModelError, read_model_shape
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.layout import CLUSTER, MEGATRON
from nemo_rl_lite.rules.model import REPLAY
from nemo_rl_lite.rules.policy import DATA_PARALLEL

GRAPHS = f"{MEGATRON}.cuda_graph_impl"
_PACKING = "policy.sequence_packing.enabled"


@rule(*CLUSTER, MEGATRON)
def graphs_hold_the_whole_pass(config: Config) -> Iterator[Violation]:
    """A graph has the kernels of one rank's pass and nothing that the host decides, copies or sends meanwhile."""
    if not records_training(config):
        return
    parallel = config.policy.megatron_cfg
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model")
    sizes = [f"{kind}_parallel_size" for kind in kinds]
    for name in (name for name in sizes if getattr(parallel, name) > 1):
        yield _excluded(f"{MEGATRON}.{name}", getattr(parallel, name), "a pass that exchanges tensors with ranks", "1")
    switches = {
        "activation_checkpointing": (parallel.activation_checkpointing, "a pass that is computed again"),
        "fine_grained_activation_offloading": (parallel.fine_grained_activation_offloading, "copies to host memory"),
        "peft.enabled": (parallel.peft.enabled, "adapters"),
    }
    for name, (on, what) in switches.items():
        if on:
            yield _excluded(f"{MEGATRON}.{name}", True, what, "false")
    if parallel.distributed_data_parallel_config.overlap_grad_reduce:
        what = "gradients that are reduced during the backward pass"
        yield _excluded(f"{DATA_PARALLEL}.overlap_grad_reduce", True, what, "false")


@rule(*CLUSTER, GRAPHS, "policy.precision", "policy.sequence_packing", "policy.dynamic_batching")
def graphs_are_of_packs(config: Config) -> Iterator[Violation]:
    mode = batch_mode(config.policy, on_gpus(config))
    if records_training(config) and mode != "packed":
        rule_text = f"records passes over packed sequences, and batches are {mode}"
        yield Violation(GRAPHS, "full_iteration", rule_text, f"{_PACKING}=true, or {GRAPHS}=none")


@rule(*CLUSTER, GRAPHS, "policy.offload_for_generation")
def what_graphs_use_stays(config: Config) -> Iterator[Violation]:
    leaving, key = leaving_for_generation(config.policy), "policy.offload_for_generation"
    moved = [name for name in leaving if name in ("parameters", "gradients")]
    if records_training(config) and moved:
        others = ",".join(name for name in leaving if name not in moved)
        rule_text = f"CUDA graphs hold addresses, and {' and '.join(moved)} come back to other ones"
        yield Violation(key, list(leaving), rule_text, f"'{key}=[{others}]', or {GRAPHS}=none")


@rule(*CLUSTER, GRAPHS, "policy.model_name")
def graphs_are_of_models_without_experts(config: Config) -> Iterator[Violation]:
    if not records_training(config):
        return
    try:
        shape = read_model_shape(config.policy.model_name)
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError):
        # Another rule reports a model that is unusable.
        return
    if shape is not None and shape.experts:
        rule_text = "the host counts the tokens of each expert during a pass, which CUDA graphs do not hold"
        yield Violation(GRAPHS, "full_iteration", rule_text, f"{GRAPHS}=none, or a model without experts")


@rule(*CLUSTER, GRAPHS, REPLAY)
def graphs_replay_no_experts(config: Config) -> Iterator[Violation]:
    """The rule above needs the model's shape, which may be unknown; graphs would then leave out the experts."""
    if records_training(config) and config.policy.router_replay.enabled:
        yield _excluded(REPLAY, True, "the experts that the engines chose", "false")


def _excluded(key: str, value: object, what: str, fix: str) -> Violation:
    return Violation(key, value, f"CUDA graphs do not hold {what}", f"{key}={fix}, or {GRAPHS}=none")
