"""What may be meant is not refused, but told."""

import pytest

from nemo_rl_lite.algorithms.loop import shown_limits
from nemo_rl_lite.config.overrides import given_keys
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.system import sandbox
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.validation.data import check_epochs
from nemo_rl_lite.validation.notes import note_total_steps, notes, notes_here

SCHEDULER = "policy.megatron_cfg.scheduler"
POLICY_LOSS = "algorithm.loss_fn.policy_loss"
KL = "algorithm.loss_fn.use_kl_in_reward=true", "algorithm.loss_fn.reference_policy_kl_penalty=0.05"
KL_TYPE = "algorithm.loss_fn.reference_policy_kl_type"
NO_VALIDATION = "algorithm.val_at_start=false algorithm.val_at_end=false algorithm.val_period=0"
ONE_STEP = "policy.train_global_batch_size=512"


def told(*arguments: str) -> str:
    return " | ".join(notes(compose_config(arguments), given_keys(arguments)))


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        (f"{SCHEDULER}.lr_warmup_iters=120", f"{SCHEDULER}.lr_warmup_iters"),
        (f"{SCHEDULER}.lr_warmup_iters=119", ""),
        (f"{SCHEDULER}.lr_decay_style=cosine", f"{SCHEDULER}.lr_decay_iters"),
        ("algorithm.max_num_steps=1", ""),
        ("algorithm.credit=turn", "algorithm.credit (needs an environment or agent)"),
        ("algorithm.credit=turn environment=calculator", ""),
        ("algorithm.turn_discount=0.9", "algorithm.turn_discount (needs algorithm.credit=turn)"),
        ("algorithm.rollouts.num_workers=1", ""),
        (
            "algorithm.rollouts.num_workers=3",
            "algorithm.rollouts.num_workers = 3: each needs an engine, so 1 will start",
        ),
        ("algorithm.rollouts.num_workers=3 generation.data_parallel_size=3", ""),
        # Two optimizer steps, at 0 and a quarter of the rate.
        (f"algorithm.max_num_steps=2 {ONE_STEP}", f"{SCHEDULER}.lr_warmup_iters = 4: the run has 2 optimizer step"),
        (f"algorithm.max_num_steps=1 {ONE_STEP}", "nothing is learned"),
        (f"algorithm.max_num_steps=3 {ONE_STEP}", ""),
        (f"algorithm.max_num_steps=1 {ONE_STEP} {SCHEDULER}.lr_warmup_iters=0", ""),
        ("algorithm=sft algorithm.max_num_steps=2", "12% of optimizer.lr"),
        (
            "environment=tools environment.kwargs.tools=[math.sqrt] environment.timeout_s=3601",
            "environment.timeout_s = 3601",
        ),
        ("reward.timeout_s=60 cluster.phase_timeout_s=59", "reward.timeout_s = 60: cluster.phase_timeout_s = 59"),
        ("reward.timeout_s=60 cluster.phase_timeout_s=null", ""),
        ("agent=harbor agent.kwargs.runtime=local", "agent.kwargs.runtime = local: the policy's commands run on this"),
        ("agent=harbor", ""),
        # On a CPU, engines of their own get weights through sockets.
        ("generation.colocated.enabled=false", ""),
        ("algorithm=sft data=hub data.path=a/b data.validation_fraction=0.1", ""),
        (
            f"algorithm=sft data=hub data.path=a/b data.validation_fraction=0.1 {NO_VALIDATION}",
            "does not validate",
        ),
        ("policy.megatron_cfg.peft.enabled=true policy.megatron_cfg.peft.dropout=0.1", "peft.dropout = 0.1"),
        ("algorithm=sft policy.megatron_cfg.peft.enabled=true policy.megatron_cfg.peft.dropout=0.1", ""),
        ("generation.top_p=0.9 generation.top_k=20", "generation.top_p = 0.9, generation.top_k = 20"),
        ("data.sources.a.weight=1 data.sources.b.weight=0", "data.sources.b.weight = 0"),
        ("data.sources.a.weight=1 data.sources.b.weight.step={0:0,9:1}", ""),
        (f"{KL_TYPE}=k1 algorithm.loss_fn.use_bias_correction_kl=false", f"{KL_TYPE} = k1"),
    ],
)
def test_notes(argument, key):
    found = told(*argument.split())
    assert key in found and bool(found) == bool(key)


@pytest.mark.parametrize(
    ("arguments", "refused", "is_told"),
    [
        ("reward=program", "namespaces: Operation not permitted", True),
        ("environment=python", "namespaces: Operation not permitted", True),
        ("reward=exact_match +reward.terms.p.name=program +reward.terms.p.weight=1", "mounts: Invalid argument", True),
        ("reward=program", "", False),
        ("reward=math", "namespaces: Operation not permitted", False),
    ],
)
def test_programs_that_are_not_isolated_are_told(arguments, refused, is_told, monkeypatch):
    monkeypatch.setattr(sandbox, "refused", lambda: refused)
    found = [*notes_here(compose_config(arguments.split()))]
    assert len(found) == is_told and all(refused in one and "network" in one for one in found)


@pytest.mark.parametrize(("command", "is_told"), [("sh -c", False), ("no-such-harness exec", True)])
def test_a_harness_that_is_not_installed_is_told(command, is_told):
    found = [
        *notes_here(compose_config(["data.sources.a.agent=codex", f"data.sources.a.agent.kwargs.command={command}"]))
    ]
    assert len(found) == is_told and all("data.sources.a.agent.kwargs.command: no-such" in one for one in found)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp", "rloo"])
def test_only_k1_has_the_gradient_of_the_kl_as_a_reward(algorithm):
    # Without a reward's KL, k1 needs the correction, which reinforce_pp switches off.
    assert told(f"algorithm={algorithm}", *KL, ONE_STEP, f"{KL_TYPE}=k1") == ""
    assert KL_TYPE in told(f"algorithm={algorithm}", *KL, ONE_STEP, f"{KL_TYPE}=k3")


@pytest.mark.parametrize(
    "algorithm",
    [
        ["algorithm=rloo"],
        ["algorithm=distillation", "teacher.model_name=Qwen/Qwen3-8B", f"{POLICY_LOSS}=reinforce"],
    ],
)
def test_without_a_ratio_a_rollout_has_one_optimizer_step(algorithm):
    samples = ["algorithm.num_prompts_per_step=64", "algorithm.num_generations_per_prompt=8"]
    assert ONE_STEP in told(*algorithm, *samples, "policy.train_global_batch_size=128")
    assert told(*algorithm, *samples) == ""
    for other in (ONE_STEP, f"{POLICY_LOSS}=clip"):
        assert told(*algorithm, *samples, other) == ""


def test_a_second_pass_is_an_optimizer_step_without_a_ratio_too():
    one_step = "policy.train_global_batch_size=256 algorithm.num_iterations=1 makes one step"
    samples = ["algorithm.num_prompts_per_step=32", "algorithm.num_generations_per_prompt=8"]
    batch = "policy.train_global_batch_size=256"
    assert one_step in told("algorithm=rloo", *samples, batch, "algorithm.num_iterations=2")
    assert told("algorithm=rloo", *samples, batch) == ""


def test_a_penalty_of_long_responses_can_make_a_mean_reward_negative():
    shaped, mean = "algorithm.reward_shaping.overlong_buffer_length=2", "algorithm.normalize_rewards=mean"
    assert "ends the run" in told(shaped, mean)
    assert told(shaped) == told(mean) == ""


def test_a_loss_without_that_term_says_nothing_of_ratios():
    own = "algorithm.loss=nemo_rl_lite.losses.grpo.GRPOLoss"
    assert told("algorithm=rloo", own) == told("algorithm=grpo") == told("algorithm=sft") == ""


def test_variables_of_trackers_that_keys_replace(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "WANDB_PROJECT", "WANDB_DISABLED", "WANDB_ENTITY"):
        monkeypatch.setenv(name, "mine")
    assert told() == ""
    found = told("logger.mlflow_enabled=true", "logger.wandb_enabled=true", "logger.wandb.mode=offline")
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_DISABLED"):
        assert variable in found
    assert "WANDB_PROJECT" not in found and "WANDB_ENTITY" not in found, "defaults, unless a key is given"
    own = "logger.wandb.project=other"
    assert "WANDB_PROJECT" in told("logger.wandb_enabled=true", "logger.wandb.mode=offline", own)


@pytest.mark.parametrize("arguments", [["lr_warmup_iters=10"], ["lr_decay_style=cosine", "lr_decay_iters=20"]])
def test_a_schedule_is_held_against_the_steps_that_the_data_has(arguments, caplog):
    config = compose_config(["algorithm=sft", *(f"{SCHEDULER}.{one}" for one in arguments)])
    note_total_steps(config, 11)
    assert not caplog.records
    note_total_steps(config, 10)
    assert f"{SCHEDULER}.lr_" in caplog.text


@pytest.mark.parametrize(
    ("steps", "epochs", "per_epoch", "ends_by"),
    [("60", "3", 267, "60 steps"), ("500", "1", 10, "10 steps"), ("null", "1", 10, ""), ("60", "3", None, "")],
)
def test_the_limit_that_ends_a_run_is_said(steps, epochs, per_epoch, ends_by):
    keys = [f"algorithm.max_num_steps={steps}", f"algorithm.max_num_epochs={epochs}"]
    keys += ["data=hub", "data.path=a/b", "data.validation_fraction=0.1"]
    said = shown_limits(compose_config(["algorithm=sft", *keys]).algorithm, per_epoch)
    assert ends_by in said and bool(said) == bool(ends_by)


def test_epochs_take_the_place_of_default_steps_where_data_ends(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n' * 9)
    of_file = [f"data.train_path={rows}", "algorithm.val_at_start=false", "algorithm.val_at_end=false"]
    epochs = "algorithm.max_num_epochs=2"
    assert compose_config([*of_file]).algorithm.max_num_steps == 30
    assert compose_config([*of_file, epochs]).algorithm.max_num_steps is None
    assert compose_config([*of_file, epochs, "algorithm.max_num_steps=7"]).algorithm.max_num_steps == 7
    assert compose_config([epochs]).algorithm.max_num_steps == 30


def test_a_step_with_more_prompts_than_the_data_has(caplog):
    config = compose_config(["algorithm.num_prompts_per_step=8", "policy.train_global_batch_size=64"])
    check_epochs(config, 8)
    check_epochs(config, 0)
    assert not caplog.records
    check_epochs(config, 5)
    assert "algorithm.num_prompts_per_step" in caplog.text


def test_prompts_without_epochs_cannot_rest():
    with pytest.raises(ConfigError, match=r"algorithm\.solved_cooldown_epochs"):
        check_epochs(compose_config(["algorithm.solved_cooldown_epochs=4"]), 0)
