"""A resumed run continues the episodes that a checkpoint has of rollouts in flight."""

import time

import pytest

from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.registry import InThisProcess
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.play import Turns
from nemo_rl_lite.rollout.saved import load_rollouts
from tests.unit.rollout.fleet import Fleet
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


def test_a_rollout_with_one_version_of_the_weights_has_no_begun_episodes(tmp_path, begin):  # noqa: F811
    fleet = Fleet()
    source = begin(fleet, ONE_STEP_OFF, continues=True)
    source.take(1, silent)
    stop_when(source, fleet, lambda playing: any(one.history.so_far for one in playing))
    source.save(tmp_path)
    assert not any(group.is_begun for one in load_rollouts(tmp_path) for group in one.groups.values())
