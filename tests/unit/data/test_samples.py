"""SFT on the samples of a teacher: what an evaluation has written, by reward."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_rl_lite.data.formats import CHATS
from nemo_rl_lite.data.sources import training_set
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.rollout.episode import Ending
from nemo_rl_lite.rollout.store import RolloutFiles
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.observability.rollouts import make_rollout

OFF = [f"algorithm.{name}" for name in ("val_at_start=false", "val_at_end=false", "val_period=0")]
SMALL = ["policy.train_global_batch_size=1"]


def samples(folder: Path, rewards: list[float | None], endings: Sequence[Ending] = (), **changes: object):
    """The chats that SFT trains on, of an evaluation with two samples a problem; the first ones end so."""
    rollout = make_rollout([f"answer {number}" for number in range(len(rewards))], rewards, samples=2)
    for episode, ending in zip(rollout.episodes, endings, strict=False):
        episode.ending = ending
    RolloutFiles(folder, None, done=0).write(0, "validation", rollout)
    path = f"data.train_path={folder}/rollouts/*.parquet"
    own = [f"data.{name}={'null' if value is None else value}" for name, value in changes.items()]
    config = compose_config(["algorithm=sft", "data=samples", path, "data.validation_fraction=0.0", *SMALL, *OFF, *own])
    return training_set(config.data, 0, CHATS).finite()


def test_right_answers_alone_are_trained_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        chats = samples(tmp_path, [0.0, 1.0, 0.5, None])
    ((said,),) = [chat.conversations for chat in chats]
    assert [(one["role"], one["content"]) for one in said.messages] == [
        ("user", "question 0"),
        ("assistant", "answer 1"),
    ]
    assert said.trained() == [1]
    assert "3 of 4 rows have no reward of at least data.min_reward = 1 and were left out" in caplog.text


@pytest.mark.parametrize(("least", "kept"), [(0.5, [1, 2]), (None, [0, 1, 2, 3]), (-1.0, [0, 1, 2])])
def test_the_least_reward_can_be_another(tmp_path, least, kept):
    chats = samples(tmp_path, [0.0, 1.0, 0.5, None], min_reward=least)
    assert [chat.conversations[0].messages[-1]["content"] for chat in chats] == [f"answer {one}" for one in kept]


def test_samples_that_were_cut_are_not_trained_on(tmp_path, caplog):
    """Their end token would be one that no one has sampled. Where no turn is left, the last one has its end."""
    endings = ("length", "stop", "turns", "error", "length")
    chats = samples(tmp_path, [1.0, 1.0, 1.0, None, 0.0], endings, min_reward=None)
    assert [chat.conversations[0].messages[-1]["content"] for chat in chats] == ["answer 1", "answer 2"]
    assert "3 of 5 rows are truncated (column 'ending') and were left out" in caplog.text


def test_where_nothing_is_right_there_is_nothing_to_train_on(tmp_path):
    with pytest.raises(LauncherError, match=r"all left out: 2 have no reward of at least data\.min_reward = 1"):
        samples(tmp_path, [0.0, None])
