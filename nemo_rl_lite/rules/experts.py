"""Rules about the kernels of mixture-of-experts models."""

from collections.abc import Iterator

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.layout import MEGATRON
from nemo_rl_lite.rules.model import REPLAY

_FUSION, _TYPE = f"{MEGATRON}.moe_router_fusion", f"{MEGATRON}.moe_router_dtype"


@rule(_FUSION, _TYPE)
def fused_routers_compute_in_float32(config: Config) -> Iterator[Violation]:
    """The kernel keeps scores in the type of the logits, where megatron-core's own code makes them float32, and it has
    no float64."""
    parallel = config.policy.megatron_cfg
    if parallel.moe_router_fusion and parallel.moe_router_dtype != "fp32":
        rule_text = "Transformer Engine's kernel needs routers that compute in float32"
        yield Violation(_FUSION, True, rule_text, f"{_TYPE}=fp32, or {_FUSION}=false")


@rule(_FUSION, REPLAY)
def fused_routers_replay_nothing(config: Config) -> Iterator[Violation]:
    if config.policy.megatron_cfg.moe_router_fusion and config.policy.router_replay.enabled:
        rule_text = "the kernel chooses experts itself, and router replay gives them"
        yield Violation(_FUSION, True, rule_text, f"{_FUSION}=false, or {REPLAY}=false")
