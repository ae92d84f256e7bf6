"""Rules about offloading."""

from collections.abc import Iterator

from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.automatic import leaving_for_generation, sleep_is_wanted
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import on_gpus, parallel_dims
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.shape import ModelShape, NoModelError, read_model_shape
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.layout import CLUSTER, MEGATRON

_OPTIMIZER = f"{MEGATRON}.optimizer"
_CPU = f"{_OPTIMIZER}.optimizer_cpu_offload"
_ACTIVATIONS = f"{MEGATRON}.fine_grained_activation_offloading"
_MODULES = f"{MEGATRON}.offload_modules"
_EXPERT_MODULES = ("expert_fc1", "moe_act")


@rule(*CLUSTER, _CPU)
def cpu_optimizer_needs_gpus(config: Config) -> Iterator[Violation]:
    if config.policy.megatron_cfg.optimizer.optimizer_cpu_offload and not on_gpus(config):
        # megatron-core would fail at the first step, because it maps CUDA parameters only.
        rule_text = "is for GPUs: on CPUs weights and optimizer states are in host memory already"
        yield Violation(_CPU, True, rule_text, f"{_CPU}=false, or offload=none")


@rule(*CLUSTER, _CPU, "policy.precision")
def cpu_optimizer_has_float32_copies(config: Config) -> Iterator[Violation]:
    precision, key = config.policy.precision, "policy.precision"
    wanted = config.policy.megatron_cfg.optimizer.optimizer_cpu_offload and on_gpus(config)
    if wanted and precision == "float32":
        # torch's optimizers refuse float32 weights, which are views of one buffer.
        rule_text = "megatron-core's CPU optimizer steps float32 copies of weights in bfloat16"
        yield Violation(key, precision, rule_text, f"{key}=bfloat16, or {_CPU}=false")


@rule(_OPTIMIZER)
def cpu_optimizer_has_a_share(config: Config) -> Iterator[Violation]:
    settings = config.policy.megatron_cfg.optimizer
    key = f"{_OPTIMIZER}.optimizer_offload_fraction"
    if settings.optimizer_cpu_offload and settings.optimizer_offload_fraction == 0:
        rule_text = "must be greater than 0 where optimizer_cpu_offload is on"
        yield Violation(key, settings.optimizer_offload_fraction, rule_text, f"{key}=1.0, or {_CPU}=false")


@rule(_OPTIMIZER)
def cpu_optimizer_is_sharded_adam(config: Config) -> Iterator[Violation]:
    settings = config.policy.megatron_cfg.optimizer
    if not settings.optimizer_cpu_offload:
        return
    if settings.optimizer != "adam":
        key = f"{_OPTIMIZER}.optimizer"
        rule_text = "optimizer_cpu_offload works on sharded states, and megatron-core shards those of adam only"
        yield Violation(key, settings.optimizer, rule_text, f"{key}=adam, or {_CPU}=false")
    elif not settings.use_distributed_optimizer:
        key = f"{_OPTIMIZER}.use_distributed_optimizer"
        rule_text = "optimizer_cpu_offload works on sharded states; otherwise master weights would stay on the GPU"
        yield Violation(key, False, rule_text, f"{key}=true, or {_CPU}=false")


@rule(_OPTIMIZER)
def overlapped_copies_have_an_optimizer(config: Config) -> Iterator[Violation]:
    settings = config.policy.megatron_cfg.optimizer
    key = f"{_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d"
    if settings.overlap_cpu_optimizer_d2h_h2d and not settings.optimizer_cpu_offload:
        yield Violation(key, True, "overlaps the copies of optimizer_cpu_offload, which is off", f"{key}=false")


@rule(_CPU, "policy.offload_optimizer_states_for_logprob", "policy.offload_for_generation")
def cpu_optimizer_states_never_move(config: Config) -> Iterator[Violation]:
    policy = config.policy
    if not policy.megatron_cfg.optimizer.optimizer_cpu_offload:
        return
    rule_text = "with optimizer_cpu_offload no phase moves optimizer states"
    if policy.offload_optimizer_states_for_logprob:
        key = "policy.offload_optimizer_states_for_logprob"
        yield Violation(key, True, rule_text, f"{key}=false")
    leaving = leaving_for_generation(policy)
    if "optimizer_states" in leaving:
        key = "policy.offload_for_generation"
        others = ",".join(name for name in leaving if name != "optimizer_states")
        yield Violation(key, leaving, rule_text, f"'{key}=[{others}]'")


@rule(*CLUSTER, "policy.offload_for_generation")
def somebody_needs_the_room(config: Config) -> Iterator[Violation]:
    leaving, key = leaving_for_generation(config.policy), "policy.offload_for_generation"
    if leaving and not generates(config):
        rule_text = f"makes room for engines that generate, and {config.algorithm.name} generates nothing"
        yield Violation(key, leaving, rule_text, f"'{key}=[]', or offload=none")
    elif leaving and not config.generation.colocated.enabled:
        rule_text = "makes room for engines on the policy's GPUs, and generation.colocated.enabled is off"
        yield Violation(key, leaving, rule_text, f"'{key}=[]', or offload=none")
    elif leaving and not sleep_is_wanted(config):
        rule_text = "makes room for engines that wake up, and generation.colocated.sleep is off"
        yield Violation(key, leaving, rule_text, f"'{key}=[]', or offload=none")
    if len(set(leaving)) < len(leaving):
        yield Violation(key, leaving, "names a component twice", f"'{key}=[{','.join(dict.fromkeys(leaving))}]'")


@rule(*CLUSTER, _ACTIVATIONS, f"{MEGATRON}.activation_checkpointing")
def activations_can_be_offloaded(config: Config) -> Iterator[Violation]:
    parallel = config.policy.megatron_cfg
    if not parallel.fine_grained_activation_offloading:
        return
    if not on_gpus(config):
        rule_text = "is for GPUs: on CPUs activations are in host memory already"
        yield Violation(_ACTIVATIONS, True, rule_text, f"{_ACTIVATIONS}=false, or offload=none")
    if parallel.activation_checkpointing:
        key = f"{MEGATRON}.activation_checkpointing"
        rule_text = "keeps no inputs of modules, so fine_grained_activation_offloading has nothing to offload"
        yield Violation(key, True, rule_text, f"{key}=false, or {_ACTIVATIONS}=false")


@rule(_ACTIVATIONS, _MODULES)
def offload_modules_go_together(config: Config) -> Iterator[Violation]:
    modules = config.policy.megatron_cfg.offload_modules
    if not config.policy.megatron_cfg.fine_grained_activation_offloading:
        return
    if not modules:
        rule_text = "must name modules where fine_grained_activation_offloading is on"
        shown = "null" if modules is None else modules
        yield Violation(_MODULES, shown, rule_text, f"'{_MODULES}=[core_attn]', or {_ACTIVATIONS}=false")
        return
    if len(set(modules)) < len(modules):
        once = ",".join(dict.fromkeys(modules))
        yield Violation(_MODULES, modules, "names a module twice", f"'{_MODULES}=[{once}]'")
    if "attn_proj" in modules and "core_attn" not in modules:
        rule_text = "attn_proj needs core_attn: its input is core_attn's output, which core_attn's backward pass needs"
        yield Violation(_MODULES, modules, rule_text, f"'{_MODULES}=[{','.join(['core_attn', *modules])}]'")


@rule(
    _ACTIVATIONS,
    _MODULES,
    "policy.model_name",
    f"{MEGATRON}.pipeline_model_parallel_size",
    f"{MEGATRON}.num_layers_in_first_pipeline_stage",
    f"{MEGATRON}.num_layers_in_last_pipeline_stage",
)
def offload_modules_are_in_the_model(config: Config) -> Iterator[Violation]:
    parallel = config.policy.megatron_cfg
    modules, model = parallel.offload_modules, _model(config)
    if not parallel.fine_grained_activation_offloading or not modules or model is None:
        return
    missing = () if model.experts else _EXPERT_MODULES
    missing += () if model.dense_layers else ("mlp",)
    absent = [name for name in modules if name in missing]
    # Transformer Engine computes these norms within the linear layer behind them; megatron-core skips them silently.
    fused = ("attn_norm",) if model.experts else ("attn_norm", "mlp_norm")
    others = [name for name in modules if name not in (*absent, *fused)]
    fix = f"'{_MODULES}=[{','.join(others or ['core_attn'])}]'"
    if absent:
        why = "has only layers with experts" if model.experts else "has no experts"
        yield Violation(_MODULES, modules, f"the model {why}, so it has no {' and no '.join(absent)}", fix)
    elif not others:
        rule_text = f"nothing to offload: in this model {' and '.join(modules)} is part of a linear layer"
        yield Violation(_MODULES, modules, rule_text, fix)
    try:
        fewest = min(parallel_dims(config).stage_layers(model.layers))
    except ValueError:
        # Another rule says that these layers cannot be spread.
        return
    if fewest == 1 and len(modules) > 1:
        # If no module of a layer is offloaded, megatron-core considers the layer finished after its first module.
        rule_text = "megatron-core offloads several modules only where a pipeline stage has more than one layer"
        yield Violation(_MODULES, modules, rule_text, f"'{_MODULES}=[{modules[0]}]', or fewer pipeline stages")


def _model(config: Config) -> ModelShape | None:
    """Return None also if the model is unusable, which another rule reports."""
    try:
        return read_model_shape(config.policy.model_name)
    except (NoModelError, OSError, UnicodeDecodeError, RuntimeError):
        return None
