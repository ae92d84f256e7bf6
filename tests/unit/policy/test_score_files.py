"""Scores of samples on disk: which rows and tokens have which."""

import resource
from dataclasses import replace

import numpy as np
import pyarrow.dataset
import pytest
import torch

from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.policy.score_files import OTHERS, SCORE_COLUMNS, ScoreFile, ScoreWriter, Update, read_scores
from tests.unit.losses.batches import loss_config

ICEPOP = GRPOLoss(
    loss_config(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio_min=0.5,
        truncated_importance_sampling_ratio=2.0,
    )
)


def batch() -> Batch:
    """A response of 3 tokens, of which the engine has other probabilities by factors of 1.5, 3 and 1, one of 1 token
    that is left out of the loss, and one in two turns."""
    engine = [[0.0, 0.0, -2.0, -3.0, -1.0], [0.0, -1.0], [0.0, -1.0, 0.0, -2.0]]
    masks = [[False, False, True, True, True], [False, False], [False, True, False, True]]
    rows = [TokenRow([7] * len(own), mask, own, 0.5) for own, mask in zip(engine, masks, strict=True)]
    padded = Batch.padded(rows)
    previous_BT = padded.generation_logprobs.clone()
    previous_BT[0, 2] += np.log(1.5)
    previous_BT[0, 3] += np.log(3.0)
    # A pass gives logprobs of prompts and padding too.
    previous_BT[padded.generation_logprobs == 0] = -5.0
    return replace(padded, previous_logprobs=previous_BT)


# Two optimizer steps: the first over two rows, with the previous logprobs; the second over the last.
UPDATES = [
    Update(slice(0, 2), np.array([1, 0]), {"logprobs": batch().previous_logprobs[:2]}, is_skipped=False),
    Update(slice(2, 3), np.array([0]), {"logprobs": torch.full((1, 5), -3.0), "entropy": torch.ones(1, 5)}, True),
]


def written(folder, numbers: list[int], count: int, loss=ICEPOP, replica: int = 0, segments=(0, 0, 0)) -> list[str]:
    writer = ScoreWriter(replica)
    target, places = ScoreFile(folder / "scores", 3, 2, count), np.array([numbers, segments])
    writer.write(target, places, batch(), UPDATES, loss)
    return writer.written()


def test_each_token_has_the_policys_logprob_and_its_weight_in_the_loss(tmp_path):
    assert written(tmp_path, [5, 0, 2], count=6) == []
    found = read_scores(tmp_path / "scores", 3)
    assert sorted(found) == [(0, 0), (1, 0), (2, 1)]
    logprobs = [0.0, 0.0, -2 + np.log(1.5), -3 + np.log(3.0), -1.0]
    assert found[2, 1]["policy_logprobs"] == pytest.approx(logprobs)
    assert found[2, 1]["correction_weights"] == pytest.approx([0.0, 0.0, 1.5, 0.0, 1.0])
    assert found[0, 0] == {"policy_logprobs": [0.0, -1.0], "correction_weights": [0.0, 0.0]}
    assert found[1, 0]["policy_logprobs"] == [0.0, -1.0, 0.0, -2.0]
    assert found[1, 0]["correction_weights"] == [0.0, 1.0, 0.0, 1.0]


def test_without_a_correction_all_trained_tokens_have_the_weight_1(tmp_path):
    written(tmp_path, [5, 0, 2], count=6, loss=GRPOLoss(loss_config()))
    assert read_scores(tmp_path / "scores", 3)[2, 1]["correction_weights"] == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_a_loss_without_weights_has_none(tmp_path):
    written(tmp_path, [5, 0, 2], count=6, loss=SFTLoss())
    found = read_scores(tmp_path / "scores", 3)
    assert [own["correction_weights"] for own in found.values()] == [None] * 3
    assert len(found[2, 1]["policy_logprobs"]) == 5


def test_only_the_first_samples_are_written_and_replicas_read_as_one_table(tmp_path):
    written(tmp_path, [5, 1, 2], count=3)
    written(tmp_path, [0, 3, 4], count=3, replica=1)
    # It has none of them.
    written(tmp_path, [5, 3, 4], count=3, replica=2)
    assert sorted(read_scores(tmp_path / "scores", 3)) == [(0, 0), (0, 1), (1, 0)]
    table = pyarrow.dataset.dataset(tmp_path / "scores").to_table()
    place = ["step", "problem", "sample", "segment"]
    assert table.column_names == [*place, *SCORE_COLUMNS, *OTHERS, "updates"] and table.num_rows == 3
    assert len(list((tmp_path / "scores").iterdir())) == 2


def test_segments_of_a_sample_follow_each_other_whatever_replica_has_them(tmp_path):
    written(tmp_path, [5, 0, 0], count=6, segments=(0, 1, 2))
    written(tmp_path, [5, 4, 0], count=6, replica=1, segments=(1, 0, 0))
    found = read_scores(tmp_path / "scores", 3)
    both, *_ = found[0, 0].values()
    assert both == [0.0, -1.0, 0.0, -2.0, 0.0, -1.0, 0.0, -1.0, 0.0, -2.0]
    assert len(found[2, 1]["correction_weights"]) == 10


def test_a_row_has_the_logprobs_of_its_training_passes(tmp_path):
    written(tmp_path, [5, 0, 2], count=6)
    table = pyarrow.dataset.dataset(tmp_path / "scores").to_table()
    first, _, last = table.column("updates").to_pylist()
    assert first == [{"optimizer_step": 0, "micro_batch": 1, "skipped": False, "logprobs": None, "entropy": None}]
    (own,) = last
    assert (own["optimizer_step"], own["micro_batch"], own["skipped"]) == (1, 0, True)
    assert own["logprobs"] == [0.0, -3.0, 0.0, -3.0] and own["entropy"] == [0.0, 1.0, 0.0, 1.0]


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path):
    """A limit on the file's size instead of a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        errors = written(tmp_path, [5, 0, 2], count=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(errors) == 1 and read_scores(tmp_path / "scores", 3) == {}
