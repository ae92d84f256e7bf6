"""The teacher of a run as a policy that only scores. Imports nothing heavy."""

from dataclasses import asdict, replace
from typing import Any

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import DistillationConfig


def as_teacher(config: Config) -> Config:
    """Return the configuration whose policy is the teacher: what is known of a policy by its configuration, such as its
    layout, its micro-batches for logprobs and its bytes, is then that of the teacher. Call it only where there is one.
    """
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
            fine_grained_activation_offloading=False,
            cuda_graph_impl="none",
            keep_logits=False,
        ),
    )
    return replace(config, policy=own)


def teacher_topk(config: Config) -> int | None:
    """How many of the teacher's largest logits the loss reads; None for those of sampled tokens alone."""
    return config.options(DistillationConfig).topk_logits_k
