"""A resumed run continues the episodes that a checkpoint has of rollouts in flight."""

import time

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.registry import InThisProcess
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutTask
from nemo_rl_lite.rollout.episode import Episode, Failure
from nemo_rl_lite.rollout.play import Turns
from nemo_rl_lite.rollout.queue import AsyncRolloutSource
from nemo_rl_lite.rollout.saved import load_groups, load_rollouts, save_groups
from tests.unit.rollout.fleet import Fleet, sampler
from tests.unit.rollout.script import Script, collected_by, judged_by
from tests.unit.rollout.test_source import IN_FLIGHT, ONE_STEP_OFF, begin, contents, silent, taken  # noqa: F401

HERE = "tests.unit.rollout.test_unfinished"


class Plain:
    """Ends after three responses; the reward is what it has kept of all."""

    def __init__(self):
        self.kept = []

    def step(self, problem, conversation):
        self.kept.append(int(conversation[-1]["content"][0]))
        if len(self.kept) == 3:
            return Observation(done=True, reward=float(sum(self.kept)))
        return Observation(({"role": "user", "content": f"{self.kept}"},), reward=0.25)


class Snapshot(Plain):
    def state(self):
        return self.kept

    def restore(self, state):
        self.kept = state


class Bytes(Plain):
    def state(self):
        return bytes(self.kept)

    def restore(self, state):
        self.kept = list(state)


class Replay(Plain):
    deterministic = True


PLAYS = {"single turns": None} | {f"{HERE}.{kind.__name__}": kind.__name__ for kind in (Plain, Snapshot, Bytes, Replay)}


def play(name):
    return None if name == "single turns" else Turns(InThisProcess(name, {}), 4, saves=True)


def episodes_in_play(source) -> list[Episode]:
    groups = [group for one in source._prefetcher._begun.values() for group in one.task.groups]
    return [one for group in groups if not group.played.done() for one in group.episodes if one.stage == "play"]


def stop_when(source, fleet, condition) -> None:
    """Pause the engines in a state of the episodes in play."""

    async def resume() -> None:
        fleet.queue.resume()

    ends = time.monotonic() + 60
    while True:
        source._run(fleet.queue.pause())
        # Environments still answer.
        time.sleep(0.02)
        if condition(episodes_in_play(source)):
            return
        assert time.monotonic() < ends
        source._run(resume())
        time.sleep(0.003)


@pytest.mark.parametrize("name", PLAYS)
@pytest.mark.parametrize("continues", [True, False])
def test_a_resumed_run_samples_only_what_the_checkpoint_lacks(tmp_path, begin, name, continues):  # noqa: F811
    options, fleet, again = {"continues": continues, "steps": 6}, Fleet(), Fleet()
    whole = taken(begin(Fleet(), IN_FLIGHT, play=play(name), **options), range(1, 7))
    source = begin(fleet, IN_FLIGHT, play=play(name), **options)
    found = taken(source, range(1, 3))
    has_turns, resumes = name != "single turns", not name.endswith("Plain")
    stop_when(
        source,
        fleet,
        lambda playing: (
            any(one.turns or not has_turns for one in playing)
            and any(one.history.so_far or not continues for one in playing)
        ),
    )
    state = source.save(tmp_path)
    source.close()
    saved = load_rollouts(tmp_path)
    groups = [group for one in saved for group in one.groups.values()]
    episodes = [one for group in groups if group.is_begun for one in group.read() if one.stage == "play"]
    assert any(one.turns for one in episodes) == (has_turns and resumes)
    assert any(one.history.begun for one in episodes) == (continues and resumes)
    source = begin(again, IN_FLIGHT, 2, state, saved, play=play(name), **options)
    found += taken(source, range(3, 7))
    assert contents(found) == contents(whole)
    kept = sum(group.generated for group in groups)
    assert again.replicas[0].sampled == sum(rollout.generated for rollout in found[2:]) - kept
    assert sum(one.resumed_tokens for one in found) == sum(group.generated for group in groups if group.is_begun)


def test_a_saved_rollout_that_has_not_begun_keeps_its_begun_episodes(tmp_path, begin):  # noqa: F811
    fleet = Fleet()
    source = begin(fleet, IN_FLIGHT, continues=True)
    taken(source, [1, 2])
    stop_when(source, fleet, lambda playing: any(one.history.so_far for one in playing))
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    state = source.save(folders[0])
    saved = load_rollouts(folders[0])
    source.close()
    source = AsyncRolloutSource(sampler(Fleet(), state), Fleet(), IN_FLIGHT, 2, 6, saved, 60.0)
    # Without weights, no rollout begins.
    source._thread_loop.start()
    source.save(folders[1])
    source.close()
    first, second = (
        {
            (one.state.step, number): (group.is_begun, group.read(), group.generated)
            for one in load_rollouts(folder)
            for number, group in one.groups.items()
        }
        for folder in folders
    )
    assert any(is_begun for is_begun, *_ in first.values())
    assert first == second


def test_only_tokens_that_a_resumed_run_continues_are_counted(tmp_path, begin):  # noqa: F811
    fleet = Fleet()
    source = begin(fleet, IN_FLIGHT, play=play(f"{HERE}.Replay"), continues=True)
    taken(source, [1, 2])
    stop_when(source, fleet, lambda playing: any(one.turns for one in playing))
    state = source.save(tmp_path)
    saved = load_rollouts(tmp_path)
    groups = [group for one in saved for group in one.groups.values() if group.is_begun]
    kept = [one for group in groups for one in group.read() if one.stage != "play"]
    # Another environment, whose episodes begin again.
    source = begin(Fleet(), IN_FLIGHT, 2, state, saved, play=play(f"{HERE}.Plain"))
    resumed = sum(one.resumed_tokens for one in taken(source, [one.state.step for one in saved]))
    assert resumed == sum(one.generated for one in kept) < sum(group.generated for group in groups)


def test_a_failure_of_a_saved_episode_counts(tmp_path):
    """A late reward is 0, so only the failure tells it."""
    problem, failure = Problem(chat("p"), "1"), Failure("reward", "no answer in time", "", "'' (answer '1')")
    episodes = [Episode(problem, [1, 2], 2, reward=0.0, stage="done", failure=own) for own in (failure, None)]
    save_groups(tmp_path / "groups.parquet", {0: episodes})
    task = RolloutTask(lambda _: problem, 1, 2, Sampling(1.0, 1.0, None, 8, (0,), ()), 0)
    task.saved = load_groups(tmp_path / "groups.parquet")
    collector = collected_by(Script(), judged_by(lambda *_: 1.0), 64, ErrorShares(0.25, 0.0))
    with pytest.raises(DataError, match="the reward failed on 1 of 2 samples"):
        collector.collect(task)


def test_a_rollout_with_one_version_of_the_weights_has_no_begun_episodes(tmp_path, begin):  # noqa: F811
    fleet = Fleet()
    source = begin(fleet, ONE_STEP_OFF, continues=True)
    source.take(1, silent)
    stop_when(source, fleet, lambda playing: any(one.history.so_far for one in playing))
    source.save(tmp_path)
    assert not any(group.is_begun for one in load_rollouts(tmp_path) for group in one.groups.values())
