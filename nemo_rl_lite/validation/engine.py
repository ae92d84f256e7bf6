"""Rules about generation engines and sampling."""

import importlib.util
from collections.abc import Iterator

from nemo_rl_lite.config.engines import (
    VLLM_LORA_RANKS,
    VLLM_QUANTIZATIONS,
    engine_of,
    engines_serve_adapters,
    engines_share_weights,
    has_build,
    has_draft_model,
    rounding_options,
    speculation,
)
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import engine_ranks, engines, generation_gpus, has_agent, has_endpoint, on_gpus
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.models.draft import draft_troubles, own_draft_layers
from nemo_rl_lite.models.shape import known_shape
from nemo_rl_lite.validation.compose import rule
from nemo_rl_lite.validation.layout import MEGATRON

_TENSOR, _PIPELINE = (f"generation.vllm_cfg.{kind}_parallel_size" for kind in ("tensor", "pipeline"))
_KWARGS, _LORA = "generation.vllm_kwargs", "generation.vllm_cfg.lora"
# Options of vLLM that the launcher sets, and the key that decides each.
_OWNED = {
    "model": "policy.model_name",
    "dtype": "policy.precision",
    "max_model_len": "policy.max_total_sequence_length",
    "tensor_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": "generation.vllm_cfg.pipeline_parallel_size",
    "enable_expert_parallel": "generation.vllm_cfg.expert_parallel",
    "nnodes": "generation.vllm_cfg.tensor_parallel_size",
    "data_parallel_size": "generation.data_parallel_size",
    "tokenizer": None,
    "enforce_eager": "generation.vllm_cfg.enforce_eager",
    "max_num_seqs": "generation.vllm_cfg.max_num_seqs",
    "gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
    "seed": "algorithm.seed",
    "logprobs_mode": None,
    "worker_extension_cls": None,
    "disable_log_stats": None,
    "skip_tokenizer_init": None,
    "enable_sleep_mode": "generation.colocated.enabled",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": "policy.megatron_cfg.peft.dim",
    "lora_target_modules": "policy.megatron_cfg.peft.target_modules",
    "fully_sharded_loras": None,
    # The engine's model would differ from the policy's.
    "hf_overrides": None,
}
# vLLM 0.26 requires widths of this multiple for block-wise FP8.
_BLOCK = 128


@rule("generation", "cluster", options=RolloutAlgorithmConfig)
def check_engine_gpus(config: Config) -> Iterator[Violation]:
    settings = config.generation.vllm_cfg
    for key, size in ((_TENSOR, settings.tensor_parallel_size), (_PIPELINE, settings.pipeline_parallel_size)):
        if size > 1 and not on_gpus(config):
            fix = f"{key}=1, and generation.data_parallel_size for more engines"
            yield Violation(key, size, "must be 1 on CPUs", fix)
        elif size > 1 and not engine_of(config).spans_gpus:
            yield Violation(key, size, f"must be 1 with the {config.generation.backend} engine", f"{key}=1")
    gpus, a_node = generation_gpus(config), config.cluster.gpus_per_node
    on_one_node, size = min(gpus, a_node), engine_ranks(config)
    # Every node of an engine has the same number of its ranks.
    if on_gpus(config) and ((on_one_node % size and size % a_node) or gpus % size):
        nodes = gpus // a_node
        sizes = [divisor for divisor in range(1, on_one_node + 1) if on_one_node % divisor == 0]
        sizes += [a_node * count for count in range(2, nodes + 1) if nodes % count == 0]
        rule_text = f"makes engines of {size} GPUs, which must divide the {on_one_node} generation GPUs per node"
        if nodes > 1:
            rule_text += f", or fill some of the {nodes} nodes"
        fix = f"tensor_parallel_size x pipeline_parallel_size = one of {sizes}"
        yield Violation(_TENSOR, settings.tensor_parallel_size, rule_text, fix)


@rule("generation", "cluster", options=RolloutAlgorithmConfig)
def check_least_engines(config: Config) -> Iterator[Violation]:
    key, least, most = "generation.min_engines", config.generation.min_engines, engines(config)
    if least is not None and least > most and not config.generation.colocated.enabled:
        of_cpus = "" if on_gpus(config) else f", or generation.data_parallel_size={least}"
        yield Violation(key, least, f"must be at most {most}, the number of engines", f"{key}={most}{of_cpus}")


@rule("generation", "cluster", "agent", "policy.router_replay", options=RolloutAlgorithmConfig)
def check_engine(config: Config) -> Iterator[Violation]:
    backend, engine = config.generation.backend, engine_of(config)
    package = engine.package
    if importlib.util.find_spec(package) is None:
        fix = "bash scripts/install.sh, or another generation.backend"
        yield Violation("generation.backend", backend, f"the package {package} is not installed here", fix)
    elif not has_build(engine, on_gpus(config)):
        fix = "cluster.gpus_per_node=1, generation=transformers, or bash scripts/install.sh cpu"
        rule_text = f"the {package} that is installed here (install.sh gpu) runs on GPUs only"
        yield Violation("generation.backend", backend, rule_text, fix)
    if config.policy.router_replay.enabled and not engine.records_experts:
        key = "policy.router_replay.enabled"
        yield Violation(key, True, f"is not supported by the {backend} engine", f"{key}=false, or generation=vllm")
    stages = config.generation.vllm_cfg.pipeline_parallel_size
    if config.policy.router_replay.enabled and stages > 1:
        fix = f"{_PIPELINE}=1, or policy.router_replay.enabled=false"
        yield Violation(_PIPELINE, stages, "must be 1 with router replay: vLLM records experts of one stage only", fix)
    # These come with vLLM.
    for package in ("fastapi", "uvicorn"):
        if has_endpoint(config) and importlib.util.find_spec(package) is None:
            key = "agent.name" if has_agent(config) else "generation.serve.enabled"
            rule_text = f"the package {package}, which the endpoint needs, is not installed here"
            yield Violation(key, None, rule_text, f"pip install {package}")
    key, host = "generation.serve.host", config.generation.serve.host
    # An address of IPv6 has several colons.
    if has_endpoint(config) and ("/" in host or host.count(":") == 1):
        rule_text = "must be a host without scheme and port"
        yield Violation(key, host, rule_text, f"{key}=127.0.0.1 generation.serve.port=8000")


@rule("generation", "algorithm.val_temperature", options=RolloutAlgorithmConfig)
def check_sampling(config: Config) -> Iterator[Violation]:
    generation, (lowest, highest) = config.generation, engine_of(config).temperatures
    validation = config.options(RolloutAlgorithmConfig).val_temperature
    temperatures = {"generation.temperature": generation.temperature, "algorithm.val_temperature": validation}
    for key, value in temperatures.items():
        # 0 is greedy, for validation only.
        if value and not lowest <= value <= highest:
            rule_text = f"must be from {lowest:g} to {highest:g} with the {generation.backend} engine"
            yield Violation(key, value, rule_text, f"{key}={min(max(value, lowest), highest):g}")


@rule("generation.max_new_tokens", "policy.max_total_sequence_length", options=RolloutAlgorithmConfig, of_sources=True)
def check_response_length(config: Config) -> Iterator[Violation]:
    new, total = config.generation.max_new_tokens, config.policy.max_total_sequence_length
    if new >= total:
        rule_text = f"must leave room for the prompt within policy.max_total_sequence_length = {total}"
        fix = f"policy.max_total_sequence_length={2 * new}, or generation.max_new_tokens={max(total // 2, 1)}"
        yield Violation("generation.max_new_tokens", new, rule_text, fix)


@rule(_KWARGS, options=RolloutAlgorithmConfig)
def check_vllm_kwargs(config: Config) -> Iterator[Violation]:
    given = config.generation.vllm_kwargs
    for name in given.keys() & _OWNED.keys():
        fix = f"set {_OWNED[name]} instead" if _OWNED[name] else "remove it"
        yield Violation(f"{_KWARGS}.{name}", None, "is set by the launcher", fix)


@rule("generation", "policy.model_name", options=RolloutAlgorithmConfig)
def check_speculation(config: Config) -> Iterator[Violation]:
    generation, key = config.generation, "generation.draft_model"
    options, policy = speculation(generation), config.policy.model_name
    method, name = generation.speculation, (options or {}).get("model")
    if options is not None and generation.min_p:
        fix = f"generation.min_p=0.0, or {'generation.speculation' if method else f'{_KWARGS}.speculative_config'}=null"
        yield Violation("generation.min_p", generation.min_p, "is not supported by vLLM with speculation", fix)
    if method == "mtp" and name is None and own_draft_layers(policy) == 0:
        rule_text = f"needs layers for multi-token prediction, and config.json of {policy} names none"
        yield Violation("generation.speculation", method, rule_text, "generation.speculation=ngram")
    elif method in ("eagle3", "draft_model") and name is None:
        fix = f"{key}=FOLDER, or generation.speculation=ngram"
        yield Violation(key, None, f"must name the draft of generation.speculation={method}", fix)
    elif options is not None and has_draft_model(generation) and name is not None:
        key = key if method is not None else f"{_KWARGS}.speculative_config.model"
        shape = None if options.get("use_heterogeneous_vocab") else known_shape(policy)
        for trouble in draft_troubles(name, shape, is_head=options.get("method") in ("eagle", "eagle3")):
            yield Violation(key, name, trouble, f"{key}=FOLDER of a draft that was trained for {policy}")


@rule("generation", "cluster", "policy", options=RolloutAlgorithmConfig)
def check_quantization(config: Config) -> Iterator[Violation]:
    key, way = f"{_KWARGS}.quantization", config.generation.vllm_kwargs.get("quantization")
    shape, size = known_shape(config.policy.model_name), config.generation.vllm_cfg.tensor_parallel_size
    if way is None:
        return
    if way not in VLLM_QUANTIZATIONS:
        rule_text = f"must be one of: {', '.join(VLLM_QUANTIZATIONS)}"
        yield Violation(key, way, rule_text, f"{key}=fp8_per_channel")
    elif not on_gpus(config):
        yield Violation(key, way, "needs GPUs", "remove it, or cluster.gpus_per_node=1")
    elif config.policy.precision != "bfloat16":
        fix = "policy.precision=bfloat16"
        yield Violation("policy.precision", config.policy.precision, f"{key} = {way} needs bfloat16", fix)
    elif shape is not None and shape.experts:
        yield Violation(key, way, "is not supported for MoE models", "remove it")
    elif way == "fp8_per_block" and shape is not None:
        widths = (shape.hidden, shape.heads * shape.head_dim // size, shape.ffn // size)
        if width := next((width for width in widths if width % _BLOCK), None):
            rule_text = f"needs layer inputs that are a multiple of {_BLOCK} on each engine rank, and one has {width}"
            yield Violation(key, way, rule_text, f"{key}=fp8_per_channel")


@rule("generation", "cluster", "policy", "refit", options=RolloutAlgorithmConfig)
def check_budget(config: Config) -> Iterator[Violation]:
    key, limit = "generation.max_gen_kl", config.generation.max_gen_kl
    options = rounding_options(config.generation)
    if limit is not None and options and engines_share_weights(config):
        rule_text = f"restarts engines without {', '.join(options)}, and these hold weights of the policy"
        yield Violation(key, limit, rule_text, f"refit.cuda_ipc=false, or {key}=null")


@rule("generation", "cluster", "policy", options=RolloutAlgorithmConfig)
def check_served_adapters(config: Config) -> Iterator[Violation]:
    if not engines_serve_adapters(config.generation, config.policy):
        return
    precision, own = config.policy.precision, config.generation.vllm_kwargs
    dim, most, key = config.policy.megatron_cfg.peft.dim, VLLM_LORA_RANKS[-1], f"{MEGATRON}.peft.dim"
    shape = known_shape(config.policy.model_name)
    quantization, load_format = own.get("quantization"), own.get("load_format")
    for broken, name, value, rule_text in (
        (dim > most, key, dim, f"must be at most {most}, the largest LoRA rank of vLLM"),
        (on_gpus(config) and precision != "bfloat16", "policy.precision", precision, "must be bfloat16"),
        (shape is not None and shape.experts, _LORA, "adapters", "is not supported for MoE models"),
        (quantization, f"{_KWARGS}.quantization", quantization, "is not supported with adapters"),
        (
            load_format == "dummy",
            f"{_KWARGS}.load_format",
            "dummy",
            "would keep random weights: refits transfer only adapters",
        ),
    ):
        if broken:
            yield Violation(name, value, f"{rule_text} ({_LORA}=adapters)", f"change it, or {_LORA}=merged")
