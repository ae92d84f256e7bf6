"""Short runs with the settings of papers, with real Megatron in this process."""

import math

import pytest

from nemo_rl_lite.models.embedded.reverse_digits import MODEL_CONFIG
from tests.functional.here import train_here
from tests.metric_names import undocumented

pytestmark = pytest.mark.functional

SHORT = [
    *("algorithm.max_num_steps=2", "algorithm.num_prompts_per_step=16", "algorithm.num_generations_per_prompt=4"),
    *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "algorithm.val_period=0"),
    *("policy.train_global_batch_size=32", "policy.train_micro_batch_size=32", "policy.logprob_batch_size=32"),
    *("generation=transformers", "reward.name=tests.functional.rewards.share_of_digits"),
]
ENTROPY = "algorithm.loss_fn.entropy_coef=0.01"


def steps(folder, model_folder, *overrides: str) -> list[dict]:
    _, lines = train_here(folder, model_folder, *SHORT, *overrides)
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
    assert all("train/kl_penalty" not in line and "train/entropy" not in line for line in found)


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
    "drgrpo": ["algorithm=drgrpo"],
    "gspo": ["algorithm=gspo"],
    "sapo": ["algorithm=sapo"],
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
