"""Scores of samples in a run's folder, against the metrics that the run has logged."""

import json
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_lite.rollout.store import read_rollout, rollout_files, step_of


def assert_scores_are_logged(folder: Path, one_optimizer_step: bool = False) -> None:
    """Compare metrics with those of the samples, which all must be in the loss.

    The mean of the weights is compared only if the run has one optimizer step a rollout: of several, it is the mean of
    means.
    """
    logged: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        logged.setdefault(line["step"], {}).update(line)
    files = [file for file in rollout_files(folder) if file.stem.endswith("-train")]
    assert files
    for file in files:
        rows, metrics = read_rollout(file, tokens=True), logged[step_of(file)]
        policy, engine, weights = (np.concatenate(own) for own in zip(*map(_sampled, rows), strict=True))
        difference = policy - engine
        assert (policy < 0).mean() > 0.5
        found = {"gen_kl_error": np.exp(difference) - 1 - difference, "logprob_abs_diff_mean": np.abs(difference)}
        if one_optimizer_step and "train/correction/weight" in metrics:
            found["correction/weight"] = weights
        for name, values in found.items():
            assert values.mean() == pytest.approx(metrics[f"train/{name}"], abs=1e-5), name


def _sampled(row: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scores of the tokens that the engine has sampled; those of other tokens are 0."""
    sampled = np.zeros(len(row["token_ids"]), bool)
    for run in row["versions"]:
        sampled[run["start"] : run["start"] + run["length"]] = True
    columns = [np.array(row[name]) for name in ("policy_logprobs", "generation_logprobs", "correction_weights")]
    assert all(values.shape == sampled.shape and not values[~sampled].any() for values in columns)
    return tuple(values[sampled].astype(np.float64) for values in columns)
