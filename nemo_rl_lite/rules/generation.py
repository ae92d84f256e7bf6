"""Rules about generation engines and sampling."""

import importlib.util
from collections.abc import Iterator

from nemo_rl_lite.config.engines import engine_of, engines_serve_adapters
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.config.sizes import generation_gpus, has_endpoint, on_gpus, parallel_dims
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.newlines import NEWLINE, has_written_newline

# Packages that the endpoint needs; they come with vLLM's.
_ENDPOINT = ("fastapi", "uvicorn")


@rule(
    "generation.vllm_cfg.tensor_parallel_size",
    "generation.data_parallel_size",
    "generation.colocated",
    "generation.backend",
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    options=RolloutAlgorithmConfig,
)
def engines_fill_their_gpus(config: Config) -> Iterator[Violation]:
    key, size = "generation.vllm_cfg.tensor_parallel_size", config.generation.vllm_cfg.tensor_parallel_size
    if not on_gpus(config):
        if size > 1:
            fix = f"{key}=1, and generation.data_parallel_size for more engines"
            yield Violation(key, size, "a CPU engine is one process", fix)
        return
    if size > 1 and not engine_of(config).spans_gpus:
        yield Violation(key, size, f"the {config.generation.backend} engine uses one GPU", f"{key}=1")
        return
    gpus, wanted = generation_gpus(config), config.generation.data_parallel_size
    on_one_node = min(gpus, config.cluster.gpus_per_node)
    if on_one_node % size:
        sizes = [divisor for divisor in range(1, on_one_node + 1) if on_one_node % divisor == 0]
        yield Violation(
            key, size, f"must divide the {on_one_node} GPUs that generation has on a node", f"one of {sizes}"
        )
    elif wanted is not None and wanted * size != gpus:
        rule_text = f"engines of {size} GPUs each fill {gpus} GPUs: there are {gpus // size}"
        yield Violation("generation.data_parallel_size", wanted, rule_text, "generation.data_parallel_size=null")


@rule("generation.backend", "cluster.gpus_per_node", options=RolloutAlgorithmConfig)
def engine_is_installed(config: Config) -> Iterator[Violation]:
    backend, package = config.generation.backend, engine_of(config).package
    if importlib.util.find_spec(package) is None:
        fix = "bash scripts/install.sh, or another generation.backend"
        yield Violation("generation.backend", backend, f"the package {package} is not installed here", fix)
    elif not on_gpus(config) and importlib.util.find_spec("transformer_engine") is not None:
        fix = "cluster.gpus_per_node=1 policy=megatron_gpu generation=vllm_gpu, or bash scripts/install.sh cpu"
        yield Violation("cluster.gpus_per_node", 0, "what is installed here (install.sh gpu) runs on GPUs only", fix)


@rule("policy.router_replay", "generation.backend", options=RolloutAlgorithmConfig)
def engine_tells_which_experts_it_chose(config: Config) -> Iterator[Violation]:
    key = "policy.router_replay.enabled"
    if config.policy.router_replay.enabled and not engine_of(config).records_experts:
        rule_text = f"the {config.generation.backend} engine does not record which experts it chooses"
        yield Violation(key, True, rule_text, f"{key}=false, or generation=vllm")


@rule("generation.serve", "agent.name", options=RolloutAlgorithmConfig)
def endpoint_is_installed(config: Config) -> Iterator[Violation]:
    missing = [package for package in _ENDPOINT if importlib.util.find_spec(package) is None]
    if has_endpoint(config) and missing:
        key = "agent.name" if config.agent.name else "generation.serve.enabled"
        rule_text = f"the package {missing[0]}, which the endpoint needs, is not installed here"
        yield Violation(key, config.agent.name or True, rule_text, f"pip install {' '.join(_ENDPOINT)}")


@rule(
    "refit.timeout_s",
    "refit.direct",
    "cluster.collective_timeout_s",
    "cluster.gpus_per_node",
    "generation.colocated",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.pipeline_model_parallel_size",
    "policy.megatron_cfg.expert_model_parallel_size",
    "policy.megatron_cfg.peft",
    "generation.backend",
    "generation.vllm_cfg.lora",
    options=RolloutAlgorithmConfig,
)
def ranks_wait_for_the_engines_of_others(config: Config) -> Iterator[Violation]:
    refit, longest = config.refit, config.cluster.collective_timeout_s
    shares_together = parallel_dims(config).splits_weights and refit.direct
    merges = config.policy.megatron_cfg.peft.enabled and not engines_serve_adapters(config.generation, config.policy)
    shares_together = shares_together and not merges
    if on_gpus(config) and config.generation.colocated.enabled and shares_together and refit.timeout_s >= longest:
        rule_text = (
            f"policy ranks wait this long for each other; must be below cluster.collective_timeout_s = {longest:g}"
        )
        yield Violation("refit.timeout_s", refit.timeout_s, rule_text, f"refit.timeout_s={longest / 2:g}")


@rule("generation.serve", options=RolloutAlgorithmConfig)
def endpoint_has_an_address(config: Config) -> Iterator[Violation]:
    key, host = "generation.serve.host", config.generation.serve.host
    # An address of IPv6 has several colons.
    if "/" in host or host.count(":") == 1:
        rule_text = "is a host alone, without http:// and without a port"
        yield Violation(key, host, rule_text, f"{key}=127.0.0.1 generation.serve.port=8000")


@rule("generation.max_new_tokens", "policy.max_total_sequence_length", options=RolloutAlgorithmConfig)
def responses_fit_the_sequence(config: Config) -> Iterator[Violation]:
    new, total = config.generation.max_new_tokens, config.policy.max_total_sequence_length
    if new >= total:
        rule_text = f"must leave room for the prompt within policy.max_total_sequence_length = {total}"
        fix = f"policy.max_total_sequence_length={2 * new}, or generation.max_new_tokens={max(total // 2, 1)}"
        yield Violation("generation.max_new_tokens", new, rule_text, fix)


@rule("generation.stop_strings", options=RolloutAlgorithmConfig)
def stop_strings_are_not_empty(config: Config) -> Iterator[Violation]:
    if "" in config.generation.stop_strings:
        key = "generation.stop_strings"
        yield Violation(key, config.generation.stop_strings, "an empty string stops at once", f"{key}=[]")
    for text in config.generation.stop_strings:
        if has_written_newline(text):
            rule_text = "has a backslash and an n, and a response that ends a line has a newline"
            yield Violation("generation.stop_strings", text, rule_text, NEWLINE)


@rule("generation.temperature", "generation.backend", "algorithm.val_temperature", options=RolloutAlgorithmConfig)
def engine_takes_the_temperatures(config: Config) -> Iterator[Violation]:
    lowest, highest = engine_of(config).temperatures
    validation = config.options(RolloutAlgorithmConfig).val_temperature
    for key, value in (
        ("generation.temperature", config.generation.temperature),
        ("algorithm.val_temperature", validation),
    ):
        # 0 is greedy, for validation alone.
        if value and not lowest <= value <= highest:
            rule_text = f"the {config.generation.backend} engine takes {lowest:g} to {highest:g}"
            yield Violation(key, value, rule_text, f"{key}={min(max(value, lowest), highest):g}")


@rule("algorithm.val_samples_per_problem", "algorithm.val_temperature", options=RolloutAlgorithmConfig)
def greedy_validation_has_one_response(config: Config) -> Iterator[Violation]:
    key, options = "algorithm.val_samples_per_problem", config.options(RolloutAlgorithmConfig)
    if options.val_samples_per_problem > 1 and not options.val_temperature:
        rule_text = "algorithm.val_temperature = 0 is greedy, and all greedy responses to a problem are the same"
        yield Violation(key, options.val_samples_per_problem, rule_text, f"{key}=1, or algorithm.val_temperature=1")


@rule("policy.megatron_cfg.peft", options=RolloutAlgorithmConfig)
def logprobs_have_no_dropout(config: Config) -> Iterator[Violation]:
    peft, key = config.policy.megatron_cfg.peft, "policy.megatron_cfg.peft.dropout"
    if peft.enabled and peft.dropout:
        rule_text = "would make training's logprobs others than those that ratios are taken to"
        yield Violation(key, peft.dropout, f"{rule_text}, which are computed without dropout", f"{key}=0.0")


@rule("generation.top_k", "algorithm.num_generations_per_prompt", options=RolloutAlgorithmConfig)
def responses_differ(config: Config) -> Iterator[Violation]:
    if config.generation.top_k == 1:
        rule_text = "leaves one token to choose, so all responses to a prompt are the same, and no advantage is left"
        yield Violation("generation.top_k", 1, rule_text, "generation.top_k=null")
