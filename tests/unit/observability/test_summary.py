import io
import json

import pytest
from rich.console import Console

from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.summary import (
    LAST_STEPS,
    MEASURED,
    SUMMARY_FILE,
    charts,
    show_summary,
    stacks,
    summarize,
    tracked,
    view_of,
)
from nemo_rl_lite.observability.trackers import MetricsLog

ADVICE = ["try harder data"]
GRPO_SECONDS = {"generation": 1.0, "policy_training": 0.5, "total_step_time": 2.0}


def run(first: dict, steps: list[dict], seconds: dict) -> MetricsLog:
    metrics = MetricsLog([])
    metrics.log(0, first)
    for step, values in enumerate(steps, start=1):
        metrics.log(step, values | {f"timing/train/{name}": value for name, value in seconds.items()})
    return metrics


def reported(metrics: MetricsLog, folder, algorithm: str, held_out: str = "held-out accuracy") -> tuple[str, dict]:
    stream, view = io.StringIO(), view_of(algorithm, held_out)
    summary = summarize(metrics, folder, {"policy-0": 7}, view, ADVICE)
    show_summary(summary, metrics, RunConsole(Console(file=stream, width=100)), "title", view)
    return stream.getvalue(), json.loads((folder / SUMMARY_FILE).read_text())


def test_a_grpo_run_is_judged_by_accuracy_reward_and_kl(tmp_path):
    steps = [{"train/reward": 0.25, "train/kl_penalty": 0.0}, {"train/reward": 0.5, "train/kl_penalty": 0.125}]
    metrics = run({"validation/accuracy": 0.125}, steps, GRPO_SECONDS)
    metrics.log(2, {"validation/accuracy": 0.75})
    (tmp_path / "hf").mkdir()
    text, summary = reported(metrics, tmp_path, "grpo")
    lines = [line.split() for line in text.splitlines()]
    assert ["│", "held-out", "accuracy", "│", "0.125", "│", "0.750", "│"] in lines
    assert any(line[:1] == ["model"] for line in lines)
    assert ["│", "KL", "to", "the", "reference", "│", "0.0000", "│", "0.1250", "│"] in lines
    assert summary["accuracy_after"] == 0.75 and summary["val_loss_after"] is None and summary["waits"] is None
    assert summary["seconds_by_phase"] == {"generate": 1.0, "train": 0.5}


def test_rewards_that_are_no_accuracy_are_called_held_out_reward(tmp_path):
    metrics = run({"validation/accuracy": -0.5}, [{"train/reward": 0.25}], GRPO_SECONDS)
    metrics.log(1, {"validation/accuracy": 2.0})
    text, summary = reported(metrics, tmp_path, "grpo", "held-out reward")
    assert ["│", "held-out", "reward", "│", "-0.500", "│", "2.000", "│"] in [line.split() for line in text.splitlines()]
    assert ADVICE[0] in text and summary["advice"] == ADVICE
    assert "accuracy" not in text and summary["accuracy_after"] is None
    assert (summary["reward_before"], summary["reward_after"]) == (-0.5, 2.0)


def test_a_run_whose_engines_work_beside_the_policy_says_who_waited(tmp_path):
    idle = "timing/rollout/engines_idle"
    steps = [{idle: 0.25, "train/trajectory_age_mean": 1.5}, {idle: 0.75, "train/trajectory_age_mean": 2.0}]
    shares = [{"train/age_1/tokens_share": 1.0}, {"train/age_2/tokens_share": 1.0}]
    metrics = run({}, [one | own for one, own in zip(steps, shares, strict=True)], GRPO_SECONDS)
    text, summary = reported(metrics, tmp_path, "grpo")
    rows = [" ".join(line.strip("│").split()) for line in text.splitlines()]
    assert {"policy waited │ 1.000 s", "engines were idle │ 0.500 s", "mean staleness │ 1.75 steps"} <= set(rows)
    assert summary["waits"] == {"policy_seconds": 1.0, "engines_seconds": 0.5, "token_age": 1.75}
    assert tracked(summarize(metrics, tmp_path, {}, ()))["waits/engines_seconds"] == 0.5


def test_phases_say_how_near_the_limits_of_the_gpu_they_are(tmp_path):
    share = "performance/generation_bandwidth_share"
    steps = [{"performance/train_fp_utilization": one, share: 0.5} for one in (0.1, 0.375, 0.41)]
    metrics = run({}, steps, GRPO_SECONDS)
    text, summary = reported(metrics, tmp_path, "grpo")
    rows = [" ".join(line.strip("│").split()) for line in text.splitlines()]
    expected = {"generate │ 1.000 │ 50% of the bandwidth", "train │ 0.500 │ 38% of the bf16 peak"}
    assert expected | {"step │ 2.000 │"} <= set(rows)
    assert summary["limit_shares"] == {"generate": 0.5, "train": 0.375}
    assert tracked(summarize(metrics, tmp_path, {}, ()))["limit_shares/train"] == 0.375


def test_an_sft_run_is_judged_by_its_losses_and_has_one_phase(tmp_path):
    steps = [{"train/loss": 3.0, "train/grad_norm": 1.0}, {"train/loss": 2.0, "train/grad_norm": 0.5}]
    metrics = run({"validation/val_loss": 3.5}, steps, {"policy_training": 0.5, "total_step_time": 0.75})
    metrics.log(2, {"validation/val_loss": 2.5})
    text, summary = reported(metrics, tmp_path, "sft")
    assert "held-out loss" in text and "2.5000" in text and "reward" not in text
    assert (summary["val_loss_before"], summary["val_loss_after"]) == (3.5, 2.5)
    assert summary["accuracy_before"] is None and summary["seconds_by_phase"] == {"train": 0.5}
    assert summary["steps"] == 2 and summary["seconds_a_step"] == pytest.approx(0.75)


def test_trackers_get_the_numbers_and_two_charts(tmp_path):
    measured = {"memory/predicted/train/parameters": 2**30, "memory/measured/train/parameters": 2**29}
    more = {"memory/measured/train/kv_cache": 2**31}
    metrics = run({}, [{"train/reward": 0.25} | measured | more], GRPO_SECONDS)
    summary = summarize(metrics, tmp_path, {"policy-0": 2**31}, ())
    values = tracked(summary)
    assert values["seconds_by_phase/generate"] == 1.0 and values["peak_memory_gb/policy-0"] == 2.0
    assert values["steps"] == 1 and "accuracy_before" not in values and "run_folder" not in values
    phases, residency = charts(summary, metrics)
    assert list(phases.rows) == [("generate", 1.0), ("train", 0.5)]
    assert list(residency.rows) == [("train: parameters", 1.0, 0.5), ("train: kv cache", None, 2.0)]


def test_a_run_without_a_step_left_says_so(tmp_path):
    with pytest.raises(LauncherError, match=r"no step was left.*algorithm\.max_num_steps"):
        summarize(MetricsLog([], [{"step": 30, "validation/accuracy": 0.7}]), tmp_path, {}, ())


def test_measured_bytes_are_means_over_the_last_steps():
    first = {f"{MEASURED}train/parameters": 1e9, f"{MEASURED}train/other": 3.0}
    last = {f"{MEASURED}train/parameters": 110.0, f"{MEASURED}generate/kv_cache": 7.0}
    steps = [first] + [last] * (LAST_STEPS - 1) + [last | {f"{MEASURED}train/parameters": 115.0}]
    expected = {"train": {"parameters": 111.0, "other": 3.0}, "generate": {"kv_cache": 7.0}}
    assert stacks(run({}, steps, GRPO_SECONDS), MEASURED) == expected
