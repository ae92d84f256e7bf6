"""Runs with an advantage for each turn."""

import math
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_lite.losses.advantages import returns_to_go, turn_advantages
from nemo_rl_lite.rollout.store import read_rollout, rollout_files
from tests.functional.here import train_here
from tests.functional.test_recovery import TASK
from tests.functional.test_resume import assert_same_weights, metrics_of

pytestmark = pytest.mark.functional

TURNS = ["environment.max_turns=3", "policy.max_total_sequence_length=96"]
RUN = [*TASK, *TURNS, "algorithm.max_num_steps=3"]
TURN = ["algorithm.credit=turn"]
OWN = "environment.name=tests.functional.digits.Digits"
BY_TURN = ["algorithm.turn_discount=0.5", "algorithm.reward_shaping.overlong_buffer_length=2"]


def rows_of(folder: Path, step: int) -> list[dict]:
    (file,) = [one for one in rollout_files(folder) if one.name == f"step-{step:08d}-train.parquet"]
    return read_rollout(file, tokens=True)


def test_a_token_has_the_return_of_its_turn_relative_to_those_of_its_group(tmp_path, model_folder):
    train_here(tmp_path / "run", model_folder, *RUN, *TURN, OWN, *BY_TURN)
    rows = rows_of(tmp_path / "run", 1)
    counts = [len(row["turn_rewards"]) for row in rows]
    assert len(set(counts)) > 1 and sum(row["length_penalty"] for row in rows) < 0
    for row in rows:
        assert row["reward"] == pytest.approx(sum(row["turn_rewards"]), abs=1e-6)
    rewards = [[*row["turn_rewards"][:-1], row["turn_rewards"][-1] + row["length_penalty"]] for row in rows]
    returns, samples = returns_to_go(rewards, 0.5), 1 + max(row["sample"] for row in rows)
    expected = turn_advantages(returns.view(len(returns), -1, samples), True, True).flatten(1).T
    for row, count, own in zip(rows, counts, expected, strict=True):
        found = np.array(row["token_advantages"])
        sampled = [found[run["start"]] for run in row["versions"]]
        assert sampled == pytest.approx(own[:count].tolist(), abs=1e-4)
        assert row["advantage"] == pytest.approx(sampled[0])
        outside = np.ones(len(found), bool)
        for run in row["versions"]:
            mine = slice(run["start"], run["start"] + run["length"])
            assert np.ptp(found[mine]) == 0
            outside[mine] = False
        assert not found[outside].any()
    metrics = metrics_of(tmp_path / "run")
    assert metrics[1, "train/early_reward"] > 0 and metrics[3, "train/grad_norm"] > 0
    assert all(map(math.isfinite, metrics.values()))


def test_with_an_outcome_only_the_run_is_that_of_episodes(tmp_path, model_folder):
    own = [*RUN, "environment.name=tests.functional.digits.LastDigits"]
    train_here(tmp_path / "episode", model_folder, *own)
    train_here(tmp_path / "turn", model_folder, *own, *TURN)
    assert_same_weights(tmp_path / "episode" / "hf", tmp_path / "turn" / "hf")
    episode, turn = metrics_of(tmp_path / "episode"), metrics_of(tmp_path / "turn")
    assert episode[1, "train/avg_turns_per_sample"] > 1 and turn[1, "train/early_reward"] == 0
    # This mean is over turns.
    measured = {key: value for key, value in episode.items() if key[1] != "train/advantages/mean"}
    # Timing decides which requests an engine computes together, and so rounding.
    assert {key: turn[key] for key in measured} == pytest.approx(measured, rel=1e-6, abs=1e-7)
    rows, by_turn = rows_of(tmp_path / "episode", 3), rows_of(tmp_path / "turn", 3)
    assert [row["advantage"] for row in rows] == [row["advantage"] for row in by_turn]
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in by_turn]
