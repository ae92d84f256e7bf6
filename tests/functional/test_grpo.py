"""GRPO and its variants, short whole runs with real Megatron in this process: settings of papers, corrections for older
weights, and passes that are left out."""

import math

import pytest
from torch import Tensor

from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.policy import logprobs
from nemo_rl_lite.policy.vocab_chunks import LMHead
from nemo_rl_lite.report.record import read_run
from tests.functional.here import train_here
from tests.functional.scores import assert_scores_are_logged
from tests.functional.test_resume import ONE_STEP_OFF
from tests.metric_names import undocumented

pytestmark = pytest.mark.functional

TWO_STEPS = [
    *("generation=transformers", "algorithm.max_num_steps=2", "algorithm.val_period=0"),
    *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "checkpoint.export_hf_at_end=false"),
]
# Two optimizer steps on each rollout.
PAPER = [
    *(*TWO_STEPS, "algorithm.num_prompts_per_step=16", "algorithm.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=32", "policy.train_micro_batch_size=32", "policy.logprob_batch_size=32"),
    "reward.name=tests.functional.rewards.share_of_digits",
]
ENTROPY = "algorithm.loss_fn.entropy_coef=0.01"


def steps(folder, model_folder, *overrides: str) -> list[dict]:
    _, lines = train_here(folder, model_folder, *PAPER, *overrides)
    assert_scores_are_logged(folder)
    assert undocumented([name for line in lines for name in line]) == []
    return [line for line in lines if "train/loss" in line]


def test_cispo_with_an_entropy_bonus_trains(tmp_path, model_folder):
    found = steps(tmp_path, model_folder, "algorithm=cispo", ENTROPY)
    assert len(found) == 2 and all(line["train/grad_norm"] > 0 for line in found)
    most = math.log(MODEL_CONFIG["vocab_size"])
    assert all(0 < line["train/entropy"] < most for line in found)
    # There is no lower bound.
    assert all(line["train/clip_ratio/low"] == 0 for line in found)


def test_rloo_trains_on_whole_responses(tmp_path, model_folder):
    found = steps(tmp_path, model_folder, "algorithm=rloo")
    assert len(found) == 2 and all(line["train/grad_norm"] > 0 for line in found)
    # Rewards are between 0 and 1, and so are differences of them without a standard deviation.
    assert all(-1 <= line["train/advantages/min"] < 0 < line["train/advantages/max"] <= 1 for line in found)
    most = math.log(MODEL_CONFIG["vocab_size"])
    assert all("train/kl_penalty" not in line and 0 < line["train/entropy"] < most for line in found)


def test_each_part_of_a_reward_has_its_own_standard_deviation(tmp_path, model_folder):
    found = steps(
        tmp_path,
        model_folder,
        *("algorithm=reinforce_pp", "algorithm.normalize_rewards=parts", "algorithm.advantage_clip_high=1.5"),
        *("+reward.terms.right.name=exact_match", "+reward.terms.right.weight=0.5"),
    )
    assert len(found) == 2 and all(line["train/grad_norm"] > 0 for line in found)
    assert all(line["train/advantages/min"] < 0 < line["train/advantages/max"] <= 1.5 for line in found)
    assert all("train/kl_penalty" in line for line in found)


def test_the_kl_of_reinforce_pp_can_be_in_the_reward(tmp_path, model_folder):
    loss = "algorithm.loss_fn"
    found = steps(
        tmp_path,
        model_folder,
        *("algorithm=reinforce_pp", "algorithm.use_leave_one_out_baseline=batch", f"{loss}.use_kl_in_reward=true"),
        *(f"{loss}.reference_policy_kl_type=k1", f"{loss}.reference_policy_kl_penalty=0.05"),
    )
    assert len(found) == 2 and all(line["train/grad_norm"] > 0 for line in found)
    first, second = (line["train/kl_penalty"] for line in found)
    assert abs(first) < 1e-6 < abs(second)


COVARIANCE = "algorithm.loss_fn.policy_loss="
PAPERS = {
    "dapo": ["algorithm=dapo"],
    "clip-cov of high entropy": [f"{COVARIANCE}clip_cov", "algorithm.loss_fn.top_entropy_quantile=0.5"],
    "kl-cov with good responses": [f"{COVARIANCE}kl_cov", "algorithm.loss_fn.positive_example_nll_weight=0.1"],
}
# What each of these logs besides.
LOGS = {
    "clip-cov of high entropy": ("train/covariance_share", "train/high_entropy_share"),
    "kl-cov with good responses": ("train/covariance_share", "train/positive_nll"),
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_setting_trains(tmp_path, model_folder, name):
    found = steps(tmp_path, model_folder, *PAPERS[name])
    assert len(found) == 2 and all(line["train/grad_norm"] > 0 for line in found)
    assert all(math.isfinite(line["train/loss"]) for line in found)
    assert all(line[metric] >= 0 for line in found for metric in LOGS.get(name, ()))


LOSS = "algorithm.loss_fn"
TYPE, RATIO = f"{LOSS}.truncated_importance_sampling_type", f"{LOSS}.truncated_importance_sampling_ratio"
REJECTION = [f"{LOSS}.sequence_rejection_ratio=1.0001", f"{LOSS}.sequence_rejection_ratio_min=0.9999"]
# What each run sets besides a weight of at most 2, and what it then does to some token of the second step.
KINDS = {
    "masked": [f"{TYPE}=icepop", f"{RATIO}=1.0001", f"{RATIO}_min=0.9999"],
    "rejected": [*REJECTION, f"{LOSS}.token_veto_ratio=1e-4", f"{LOSS}.importance_sampling_correction_level=sequence"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_older_weights_is_corrected(tmp_path, model_folder, kind):
    """The first rollout is the policy's own, on which no correction acts; the second is one step old."""
    short = ["algorithm.max_num_steps=2", "algorithm.val_period=0", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"]
    _, lines = train_here(tmp_path, model_folder, *ONE_STEP_OFF, *short, *KINDS[kind])
    first, second = ({k: v for line in lines if line["step"] == step for k, v in line.items()} for step in (1, 2))
    assert undocumented([*first, *second]) == []
    assert {"timing/rollout/engines_idle", "refit/pause_s"} <= second.keys()
    told = read_run(tmp_path).waits
    assert told is not None and [step for step, _, _ in told["steps"]] == [1, 2]
    assert {"logprob", "train", "refit"} <= {activity for activity, *_ in told["policy"]}
    assert first["train/correction/ess"] == pytest.approx(1, abs=1e-4) and first["train/age_0/tokens_share"] == 1
    assert second["train/age_1/tokens_share"] == 1 and "train/age_0/tokens_share" not in second
    assert second["train/age_1/gen_kl_error"] == pytest.approx(second["train/gen_kl_error"])
    assert_scores_are_logged(tmp_path, one_optimizer_step=True)
    assert first[f"train/correction/{kind}"] == 0 < second[f"train/correction/{kind}"]
    assert second["train/correction/ess"] < 1


KEY = "algorithm.loss_fn.force_on_policy_ratio"
ON_POLICY = [
    *(*TWO_STEPS, "algorithm.num_prompts_per_step=8", "policy.train_global_batch_size=64"),
    *("policy.train_micro_batch_size=16", "policy.logprob_batch_size=16"),
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
]
PASS = "performance/policy_and_reference_logprobs_tokens_per_sec"


def trained(folder, model_folder, *overrides) -> dict[str, float]:
    """What the loss of the second step measured, and whether logprobs had a pass."""
    _, lines = train_here(folder, model_folder, *ON_POLICY, *overrides)
    assert_scores_are_logged(folder)
    last = {name: value for line in lines if line["step"] == 2 for name, value in line.items()}
    return {name: value for name, value in last.items() if name.startswith("train/") or name == PASS}


@pytest.mark.parametrize(
    ("batch", "penalty"),
    [([], 0.0), (["policy.train_global_batch_size=32"], 0.001)],
    ids=["one optimizer step", "two with a reference"],
)
def test_a_pass_that_repeats_changes_nothing(tmp_path, model_folder, batch, penalty):
    """Neither the loss and its gradient, nor the names of metrics, nor what is found of the engines' mismatch."""
    overrides = [*batch, f"algorithm.loss_fn.reference_policy_kl_penalty={penalty}"]
    repeated = trained(tmp_path / "repeated", model_folder, *overrides, f"{KEY}=false")
    found = trained(tmp_path / "saved", model_folder, *overrides)
    assert (PASS in found) is bool(batch or penalty) and PASS in repeated
    for measured in (found, repeated):
        measured.pop(PASS, None)
    assert found == pytest.approx(repeated, rel=1e-6, abs=1e-9)
    if not batch:
        assert found["train/probs_ratio_min"] == found["train/probs_ratio_max"] == 1


def test_kept_logits_change_nothing(tmp_path, model_folder, monkeypatch):
    """They are kept in training passes only, and what comes of them is what comes of logits that are computed twice."""
    kept, ways = [], logprobs._implementation

    def note(hidden: Tensor, head: LMHead) -> object:
        kept.append(head.keep)
        return ways(hidden, head)

    monkeypatch.setattr(logprobs, "_implementation", note)
    key = "policy.megatron_cfg.keep_logits"
    found, expected = (
        trained(tmp_path / name, model_folder, f"{KEY}=false", f"{key}={name}") for name in ("true", "false")
    )
    found.pop(PASS), expected.pop(PASS)
    assert found == expected
    # Two steps of four micro-batches, each with a forward and a backward pass. Passes for logprobs keep nothing.
    assert kept.count(True) == 2 * 4 * 2 < len(kept)
