"""Runs on rollouts of older weights, with corrections of several kinds."""

import pytest

from nemo_rl_lite.run.report.record import read_run
from tests.functional.here import train_here
from tests.functional.test_resume import ONE_STEP_OFF
from tests.metric_names import undocumented

pytestmark = pytest.mark.functional

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
    assert first[f"train/correction/{kind}"] == 0 < second[f"train/correction/{kind}"]
    assert second["train/correction/ess"] < 1
