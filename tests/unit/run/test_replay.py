"""`nrl-lite replay` without a process: which rollouts and changes it accepts."""

import numpy as np
import pytest

from nemo_rl_lite import replay
from nemo_rl_lite.config.algorithms import generates
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.errors import ConfigError, LauncherError
from nemo_rl_lite.rollout.replayed import SavedRollouts, episode_of
from nemo_rl_lite.rollout.store import RolloutFiles, read_rollout, rollout_files
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.observability.rollouts import make_rollout
from tests.unit.rollout.test_segments import three_episodes
from tests.unit.run.run_folders import make_run

SIZES = ["algorithm.num_prompts_per_step=2", "algorithm.num_generations_per_prompt=2"]

WITHOUT_VALIDATIONS = ["algorithm.val_period=0", "algorithm.val_at_start=false", "algorithm.val_at_end=false"]


def saved(folder, *overrides: str) -> SavedRollouts:
    options = compose_config([*SIZES, *overrides]).options(GRPOConfig)
    return SavedRollouts(folder, options, most=4, limits={})


def test_a_saved_rollout_has_the_same_rows(tmp_path):
    before = make_rollout(["a", "b", "c", "d"], [0.1, 1 / 3, None, 0.25], samples=2)
    before.episodes[1].reward_parts = {"format": 0.7, "answer": 0.1}
    before.episodes[1].note_metrics("step()", {"calls": 2})
    before.episodes[3].ending = "length"
    RolloutFiles(tmp_path, None, done=0).write(3, "train", before)
    after = saved(tmp_path).take(3, lambda _: None)
    assert after.reward_errors == 1 and after.samples_per_prompt == 2
    assert [one.reward for one in after.episodes] == [0.1, 1 / 3, None, 0.25]
    assert after.episodes[1].reward_parts == {"format": 0.7, "answer": 0.1}
    assert before.episode_metrics() == after.episode_metrics() == {"episode/calls": 2}
    advantages = [0.1, 0.2, 0.3, 0.4]
    for one, other in zip(before.rows(advantages, 2), after.rows(advantages, 2), strict=True):
        for name in ("tokens", "mask", "generation_logprobs", "ages"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert (one.advantage, one.reward) == (other.advantage, other.reward)
    # The keys of this run shape the rewards.
    filtered = saved(tmp_path, "algorithm.overlong_filtering=true").take(3, lambda _: None)
    assert [one.is_left_out for one in filtered.episodes] == [False, False, False, True]


def test_segments_and_the_order_of_their_turns_return(tmp_path):
    several = three_episodes()
    RolloutFiles(tmp_path, None, done=0).write(1, "train", several)
    rows = read_rollout(rollout_files(tmp_path)[0], tokens=True)
    for before, after in zip(several.episodes, map(episode_of, rows), strict=True):
        assert after.order == before.order and after.row_count == before.row_count
        for one, other in zip(before.row_segments, after.row_segments, strict=True):
            assert list(one.tokens) == list(other.tokens) and one.prompt_length == other.prompt_length
            assert [start for start, _ in one.turns] == [start for start, _ in other.turns]
            assert [*one.sampled_runs()] == [*other.sampled_runs()]


def test_a_limited_log_is_an_error_that_names_the_key(tmp_path):
    RolloutFiles(tmp_path, 3, done=0).write(1, "train", make_rollout(["a"] * 4, [0.0] * 4, samples=2))
    with pytest.raises(LauncherError, match=r"has 3 of 4 samples of step 1; .* logger.log_samples=null"):
        saved(tmp_path).take(1, lambda _: None)


def test_a_replay_starts_no_engine():
    assert generates(compose_config([])) and not generates(
        compose_config(["algorithm.rollouts.replay=outputs/one", *WITHOUT_VALIDATIONS])
    )


def test_a_replay_cannot_validate():
    with pytest.raises(ConfigError) as told:
        compose_config(["algorithm.rollouts.replay=outputs/one"])
    assert "algorithm.val_period=0" in str(told.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "2", "reward.name=math"], ["reward.name = 'math'", "train --like"]),
        (
            ["--step", "2", "generation.temperature=0.5", "algorithm.seed=3"],
            ["generation.temperature", "algorithm.seed"],
        ),
        (["--step", "7"], ["--step = 7", "steps from 1 to 6"]),
        (["--step", "5", "--steps", "4"], ["--steps = 4", "no rollout of step 7", "steps from 1 to 6"]),
        (["--step", "2", "algorithm.max_num_steps=9"], ["fix: --steps N"]),
        (["--step", "0"], ["--step 0: must be at least 1"]),
        (["--step", "2", "algorithm.loss_fn.ratio_clip=0.4"], ["ratio_clip"]),
    ],
)
def test_what_a_replay_cannot_honour_is_told_before_it_starts(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        replay.main([str(run), *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and all(text in error for text in said)
    assert not (tmp_path / "outputs").exists()


def test_a_run_of_another_algorithm_has_no_rollouts(tmp_path, capsys):
    with pytest.raises(SystemExit):
        replay.main([str(make_run(tmp_path / "run", "algorithm=sft")), "--step", "1"])
    assert "algorithm = 'sft'" in capsys.readouterr().err
