"""What an evaluation has found, as numbers and as a table."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nemo_rl_lite.errors import DataError
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.rollout.episode import RESAMPLES, Rollout, interval, ks, pass_at_k, passes

_INTERVALS = f"95 %: percentiles of {RESAMPLES} resamples of the problems, with a fixed seed"


def summarize(rollout: Rollout, pass_reward: float) -> dict[str, Any]:
    """Return the numbers of all samples, as JSON has them. Lengths are in tokens.

    Raises:
        DataError: no response has a reward.
    """
    samples = rollout.samples_per_prompt
    rewards_PK = rollout.rewards_B.view(-1, samples).numpy()
    judged_PK = ~np.isnan(rewards_PK)
    if not judged_PK.any():
        raise DataError("no response has a reward: the log above has the first error")
    problems, metrics = len(rewards_PK), rollout.metrics()
    passed_P = passes(rewards_PK, pass_reward).sum(axis=1)
    average = float(np.nanmean(rewards_PK))
    at_k = {k: pass_at_k(passed_P, samples, k) for k in ks(samples)}
    return {
        "problems": problems,
        "samples": samples,
        "intervals": _INTERVALS,
        "avg": _number(average, *interval(np.nansum(rewards_PK, axis=1), judged_PK.sum(axis=1))),
        "pass_reward": pass_reward,
        "pass_at_k": {
            str(k): _number(float(found_P.mean()), *interval(found_P, np.ones(problems))) for k, found_P in at_k.items()
        },
        "reward_parts": {key: value for key, value in metrics.items() if key.startswith("reward/")},
        "mean_length": metrics["mean_gen_tokens_per_sample"],
        "max_length": metrics["max_gen_tokens_per_sample"],
        "truncated_share": metrics["truncation_rate"],
        "reward_errors": rollout.reward_errors,
        "environment_errors": rollout.environment_errors,
    }


def show(found: Mapping[str, Any], title: str, console: RunConsole) -> None:
    """Print the table."""
    samples, rows = found["samples"], list[tuple[str, str, str]]()
    rows.append((f"avg@{samples}", *_shown(found["avg"])))
    rows += [(f"pass@{k}", *_shown(one)) for k, one in found["pass_at_k"].items()]
    rows += [(name, f"{value:.4f}", "") for name, value in found["reward_parts"].items()]
    rows.append(("mean length (tokens)", f"{found['mean_length']:.1f}", ""))
    rows.append(("cut by length", f"{found['truncated_share']:.2%}", ""))
    rows.append(("reward errors", str(found["reward_errors"]), ""))
    if found["environment_errors"]:
        rows.append(("environment errors", str(found["environment_errors"]), ""))
    console.table(title, ("", "value", "95 % interval"), rows)


def _number(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def _shown(one: Mapping[str, float]) -> tuple[str, str]:
    return f"{one['value']:.4f}", f"{one['low']:.4f} to {one['high']:.4f}"
