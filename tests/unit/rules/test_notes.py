"""What may be meant is not refused, but told."""

import pytest

from nemo_rl_lite.config.overrides import given_keys
from nemo_rl_lite.rules.compose import compose_command
from nemo_rl_lite.rules.notes import notes

OPTIMIZER = "policy.megatron_cfg.optimizer"
DECAY = "policy.megatron_cfg.scheduler.lr_decay"
WARM_UP = "policy.megatron_cfg.scheduler.lr_warmup_iters"


def told(*arguments: str) -> str:
    return " | ".join(notes(compose_command(arguments), given_keys(arguments)))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("data.system_prompt='One.\\nTwo.'", "data.system_prompt has a backslash and an n"),
        ("data.system_prompt='\\neq is unequal, \\nabla a gradient'", ""),
        ("data.system_prompt='One.\nTwo.'", ""),
        (f"{WARM_UP}=120", f"{WARM_UP} = 120: the run has 120 optimizer steps"),
        (f"{WARM_UP}=119", ""),
        ("algorithm.max_num_steps=1", ""),
        (f"{OPTIMIZER}.lr=3.0", f"{OPTIMIZER}.lr = 3: an optimizer step moves each weight"),
        (f"{OPTIMIZER}.lr=0.01", ""),
        (f"{OPTIMIZER}.weight_decay=100.0", f"{OPTIMIZER}.weight_decay = 100: a usual weight decay"),
        (f"{OPTIMIZER}.adam_beta1=0.9999", f"{OPTIMIZER}.adam_beta1 = 0.9999 exceeds"),
        (f"{OPTIMIZER}.adam_beta2=0.95", ""),
        ("algorithm.loss_fn.ratio_clip_min=0.8", "algorithm.loss_fn.ratio_clip_min = 0.8: it is subtracted from 1"),
        ("generation.temperature=0.05", "generation.temperature = 0.05: the responses to a prompt will hardly differ"),
        ("algorithm.loss_fn.ratio_clip_max=1.2", "algorithm.loss_fn.ratio_clip_max = 1.2: it is added to 1"),
        ("algorithm.loss_fn.reference_policy_kl_penalty=10.0", "reference_policy_kl_penalty = 10: the KL outweighs"),
        (f"{OPTIMIZER}.adam_eps=1.0", f"{OPTIMIZER}.adam_eps = 1: larger than most gradients"),
        (f"{DECAY}_style=cosine", f"{DECAY}_iters = 1000: the run has 120 optimizer steps"),
        ("refit.bucket_bytes=512", "refit.bucket_bytes = 512: a bucket's size is in bytes"),
        ("refit.bucket_bytes=1048576", ""),
        ("cluster.collective_timeout_s=1800000", "cluster.collective_timeout_s = 1.8e+06: the key is in seconds"),
        ("refit.timeout_s=5000", "refit.timeout_s = 5000: cluster.phase_timeout_s = 3600 may end the run before"),
        ("refit.timeout_s=250", ""),
        ("checkpoint.must_save_by=3:50", "checkpoint.must_save_by = 3:50: the run saves and stops 3.83 minutes after"),
        ("checkpoint.must_save_by=3:50:00", ""),
        # On a CPU, engines of their own get weights through sockets.
        ("generation.colocated.enabled=false", ""),
    ],
)
def test_notes(argument, words):
    found = told(argument)
    assert words in found and bool(found) == bool(words)


POLICY_LOSS = "algorithm.loss_fn.policy_loss"
KL = "algorithm.loss_fn.use_kl_in_reward=true", "algorithm.loss_fn.reference_policy_kl_penalty=0.05"
KL_TYPE = "algorithm.loss_fn.reference_policy_kl_type"
ONE_STEP = "policy.train_global_batch_size=512"


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp", "rloo"])
def test_only_k1_has_the_gradient_of_the_kl_as_a_reward(algorithm):
    # Without a reward's KL, k1 needs the correction, which reinforce_pp switches off.
    assert told(f"algorithm={algorithm}", *KL, ONE_STEP, f"{KL_TYPE}=k1") == ""
    assert told(f"algorithm={algorithm}", *KL, ONE_STEP, f"{KL_TYPE}=k3").startswith(
        f"{KL_TYPE} = k3: with algorithm.loss_fn"
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        ["algorithm=rloo"],
        ["algorithm=distillation", "teacher.model_name=Qwen/Qwen3-8B", f"{POLICY_LOSS}=reinforce"],
    ],
)
def test_without_a_ratio_a_rollout_has_one_optimizer_step(algorithm):
    samples = ["algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"]
    found = told(*algorithm, *samples)
    assert found.startswith(f"{POLICY_LOSS} = reinforce: a rollout has 4 optimizer steps")
    assert f"({ONE_STEP} makes one step, {POLICY_LOSS}=clip has a ratio)" in found
    for other in (ONE_STEP, f"{POLICY_LOSS}=clip"):
        assert told(*algorithm, *samples, other) == ""


def test_a_loss_without_that_term_says_nothing_of_ratios():
    own = "algorithm.loss=nemo_rl_lite.losses.grpo.GRPOLoss"
    assert told("algorithm=rloo", own) == told("algorithm=grpo") == told("algorithm=sft") == ""


def test_variables_of_trackers_that_keys_replace(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DISABLED", "true")
    monkeypatch.setenv("WANDB_NAME", "first")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    assert told() == ""
    wandb = ("logger.wandb_enabled=true", "logger.wandb.mode=offline")
    found = told("logger.mlflow_enabled=true", *wandb)
    assert "MLFLOW_TRACKING_URI is not read; logger.mlflow.tracking_uri = outputs/mlruns" in found
    assert "WANDB_PROJECT is not read; logger.wandb.project = nemo_rl_lite" in found
    assert "WANDB_ENTITY" not in found, "W&B reads it where the key is null"
    assert "WANDB_ENTITY is not read; logger.wandb.entity = us" in told(*wandb, "logger.wandb.entity=us")
    assert "WANDB_NAME is not read; logger.wandb.name = grpo-reverse_digits" in found
    assert "WANDB_DISABLED is not read; logger.wandb_enabled = True" in found
    monkeypatch.delenv("WANDB_DISABLED")
    monkeypatch.delenv("WANDB_NAME")
    same = "logger.mlflow.tracking_uri='http://elsewhere:5000'"
    assert told("logger.mlflow_enabled=true", same, *wandb, "logger.wandb.project=mine") == ""
