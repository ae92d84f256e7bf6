"""Rollouts on disk."""

import resource
import time
from dataclasses import replace

import numpy as np
import pyarrow.dataset
import pytest
import torch
from pyarrow import parquet

from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.observability.sinks import spread
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.policy.score_files import write_scores
from nemo_rl_lite.rollout.episode import Span
from nemo_rl_lite.rollout.rollout import SampleFile
from nemo_rl_lite.rollout.store import (
    RolloutFiles,
    Times,
    read_rollout,
    read_spans,
    read_times,
    rollout_files,
    write_samples,
)
from tests.unit.losses.batches import loss_config
from tests.unit.observability.rollouts import make_rollout

FOUR = make_rollout(["a", "b", "c", "d"], [0.0, 1.0, 0.5, 0.25], samples=2)


def names(folder) -> list[str]:
    return [file.stem for file in rollout_files(folder)]


def test_every_sample_is_there_and_the_folder_reads_as_one_table(tmp_path):
    files = RolloutFiles(tmp_path, None, done=0)
    files.write(1, "train", FOUR)
    files.write(2, "validation", FOUR)
    first, _ = rollout_files(tmp_path)
    rows = read_rollout(first)
    assert [(row["problem"], row["sample"], row["response"], row["reward"]) for row in rows] == [
        (0, 0, "a", 0.0),
        (0, 1, "b", 1.0),
        (1, 0, "c", 0.5),
        (1, 1, "d", 0.25),
    ]
    assert rows[2]["prompt"] == [{"role": "user", "content": "question 1", "other": None}] and rows[2]["answer"] == "1"
    assert rows[0]["tokens"] == 3 and rows[0]["prompt_tokens"] == 2 and rows[0]["ending"] == "stop"
    spans = [(one["what"], one["begin"], one["end"], one["place"]) for one in rows[1]["spans"]]
    assert spans == [("generate", 0.0, 2.0, 1), ("reward", 2.0, 2.5, 0)]
    whole = pyarrow.dataset.dataset(tmp_path / "rollouts").to_table()
    assert whole.num_rows == 8 and set(whole["split"].to_pylist()) == {"train", "validation"}


def test_tokens_logprobs_and_versions_are_columns(tmp_path):
    rollout = make_rollout(["a"], [0.0])
    (episode,) = rollout.episodes
    (_, turn), prompt = episode.turns[0], episode.tokens[:2]
    episode.turns[0] = 2, replace(turn, logprobs=(-0.5, -1 / 3, -2.0), versions=(3, 3, 4))
    episode.add_messages([8], [{"role": "user", "content": "on"}])
    episode.add_turn(Completion((9,), (-0.25,), "stop", (4,)), "nine")
    rollout.advantages = [0.75]
    RolloutFiles(tmp_path, None, done=0).write(1, "train", rollout)
    (file,) = rollout_files(tmp_path)
    schema = parquet.read_schema(file)
    types = [str(schema.field(name).type) for name in ("token_ids", "generation_logprobs", "advantage")]
    assert types == ["list<element: int32>", "list<element: float>", "float"]
    (row,) = read_rollout(file, tokens=True)
    assert row["token_ids"] == [*prompt, 1, 2, 3, 8, 9] and row["advantage"] == 0.75
    assert row["generation_logprobs"] == [0.0, 0.0, -0.5, float(np.float32(-1 / 3)), -2.0, 0.0, -0.25]
    runs = [(run["start"], run["length"], run["version"]) for run in row["versions"]]
    assert runs == [(2, 2, 3), (4, 1, 4), (6, 1, 4)]
    assert "token_ids" not in read_rollout(file)[0]


def test_scores_of_the_policy_are_joined(tmp_path, caplog):
    files, targets = RolloutFiles(tmp_path, 3, done=0), []
    batch = Batch.padded([TokenRow([0] * 5, [place > 1 for place in range(5)], [-1.0] * 5)] * 4)
    batch = replace(batch, previous_logprobs=-0.5 - torch.arange(4.0)[:, None].expand(4, 5))

    def write(target):
        targets.append(target)
        errors = write_scores(target, 0, np.array([[3, 2, 1, 0], [0] * 4]), batch, [], GRPOLoss(loss_config()))
        return lambda: [*errors, "the disk is full"]

    files.scored(1, FOUR, write)
    files.write(1, "train", FOUR)
    files.write(2, "validation", FOUR)
    assert [target.count for target in targets] == [3] and "the disk is full" in caplog.text
    trained, validated = (read_rollout(file, tokens=True) for file in rollout_files(tmp_path))
    assert [row["policy_logprobs"][2] for row in trained] == [-3.5, -2.5, -1.5]
    assert all(row["correction_weights"] == [0, 0, 1, 1, 1] for row in trained)
    assert {(row["policy_logprobs"], row["correction_weights"]) for row in validated} == {(None, None)}
    RolloutFiles(tmp_path, None, done=0)
    assert [file.stem for file in (tmp_path / "scores-undone").iterdir()] == ["step-00000001-0"]
    assert list((tmp_path / "scores").iterdir()) == []


def test_without_sample_files_no_scores_are_written(tmp_path):
    RolloutFiles(tmp_path, 0, done=0).scored(1, FOUR, pytest.fail)


def test_when_it_was_sampled_and_what_its_step_did_are_known(tmp_path):
    timer = Timer()
    with timer("generation"):
        rollout = make_rollout(["a"], [0.0])
        rollout.episodes[0].spans = [Span("generate", time.perf_counter(), time.perf_counter() + 1.0)]
    before = time.time()
    RolloutFiles(tmp_path, None, done=0).write(1, "train", rollout, timer.phases)
    (file,) = rollout_files(tmp_path)
    times = read_times(file)
    ((name, began, ended),) = times.phases
    assert name == "generation" and before - 60 < began <= times.began <= ended <= before + 60
    (span,) = read_spans(file)
    assert span["what"] == "generate" and (span["begin"], span["end"]) == (0.0, pytest.approx(1.0, abs=0.1))


def test_a_rollout_that_a_checkpoint_kept_has_no_time_of_its_own(tmp_path):
    rollout = make_rollout(["a"], [0.0])
    rollout.episodes[0].spans = []
    RolloutFiles(tmp_path, None, done=0).write(1, "train", rollout)
    (file,) = rollout_files(tmp_path)
    assert read_times(file) == Times(None, []) and read_spans(file) == []


@pytest.mark.parametrize(("limit", "expected"), [(0, None), (3, 3), (9, 4)])
def test_a_limit_on_samples(tmp_path, limit, expected):
    RolloutFiles(tmp_path, limit, done=0).write(1, "train", FOUR)
    assert [len(read_rollout(file)) for file in rollout_files(tmp_path)] == ([expected] if expected else [])


def test_rollouts_of_steps_that_are_taken_again_are_put_aside(tmp_path):
    files = RolloutFiles(tmp_path, None, done=0)
    for step in (1, 2, 3):
        files.write(step, "train", FOUR)
    # What a kill left of one that was being written.
    (tmp_path / "rollouts" / ".step-00000004-train.parquet").write_bytes(b"PAR1 cut")
    again = RolloutFiles(tmp_path, None, done=1)
    assert names(tmp_path) == ["step-00000001-train"]
    assert len(list((tmp_path / "rollouts-undone").iterdir())) == 2
    assert not list((tmp_path / "rollouts").glob(".*"))
    again.write(2, "train", FOUR)
    RolloutFiles(tmp_path, None, done=1)
    assert names(tmp_path) == ["step-00000001-train"]


def test_parts_of_an_earlier_attempt_are_not_joined_with_a_later_one(tmp_path):
    files = RolloutFiles(tmp_path, None, done=0)
    files.write(1, "train", FOUR)
    write_samples(SampleFile(tmp_path / "rollouts", 1, "train", 2, None), [(0, FOUR.episodes[0], None)], worker=0)
    again = RolloutFiles(tmp_path, None, done=0)
    again.write(1, "train", FOUR)
    RolloutFiles(tmp_path, None, done=0)
    (undone,) = (tmp_path / "rollouts-undone").iterdir()
    assert len(read_rollout(undone)) == 4


def test_a_full_disk_ends_no_run_and_leaves_no_half_file(tmp_path, caplog):
    """A limit on the file's size instead of a full disk."""
    files, limits = RolloutFiles(tmp_path, None, done=0), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        files.write(1, "train", FOUR)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == [] and "rollout of step 1 cannot be written" in caplog.text
    files.write(2, "train", FOUR)
    assert names(tmp_path) == ["step-00000002-train"]


def test_samples_are_spread_from_the_worst_to_the_best():
    assert spread([0.5, 0.0, 1.0, 0.25], 2) == [1, 2]
    assert spread([0.5, 0.0, 1.0, 0.25], 3) == [1, 0, 2]
    assert spread([1.0], 2) == [0] and spread([], 2) == []
    worst, best = FOUR.samples(2)
    assert (worst.response, worst.reward, best.response, best.reward) == ("a", 0.0, "b", 1.0)
