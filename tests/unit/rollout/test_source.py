"""When rollouts are generated, with which weights, and what a checkpoint keeps of them."""

import dataclasses
import threading
from pathlib import Path

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.rollout import Rollout
from nemo_rl_lite.rollout.saved import load_rollout, save_rollout
from nemo_rl_lite.rollout.source import OneStepOff, OnPolicy, RolloutSource


def silent(_: str) -> None: ...


class Engines:
    """The sampler, and the engines behind it: a rollout says its step, the position in the data where it began, and the
    weights that sampled it."""

    def __init__(self, position: int = 0):
        self.position, self.weights, self.working, self.fails_at = position, -1, 0, None
        self.began = threading.Event()

    def rollout(self, step: int, show) -> Rollout:
        self.working += 1
        assert self.working == 1, "two rollouts at a time"
        self.began.set()
        if step == self.fails_at:
            raise EngineError("no numbers")
        show(f"rollout {step}")
        version, first = self.weights, self.position
        self.position += 3
        self.working -= 1
        return make_rollout(step, first, version)

    def held_out(self, step: int, show) -> Rollout:
        assert not self.working
        return make_rollout(-step, 0, self.weights)

    def refit(self, version: int) -> dict[str, float]:
        assert not self.working, "new weights in the middle of a rollout"
        self.weights = version
        return {"bytes": 8.0}

    def state(self):
        return {"position": self.position}


def make_rollout(step: int, position: int, version: int) -> Rollout:
    problem = Problem(chat(f"step {step}"), "7", {"row": [1, "é"]}, ({"type": "function"},))
    episode = Episode(problem, [1, 2], 2)
    episode.add_turn(Completion((5, 6, 7), (-0.1, -1 / 3, -1e-9), "length", version), "five")
    episode.add_messages([8], [{"role": "user", "content": "on"}])
    episode.add_turn(Completion((9,), (-0.5,), "stop", version), "nine")
    episode.reward, episode.reward_parts = 1 / 3, {"format": 0.25}
    lost = Episode(Problem(chat("lost"), ""), [3], 1, ending="error", is_left_out=True, own_prompt=chat("own"))
    lost.add_turn(Completion((4,), (-2.0,), "stop", version), "four")
    return Rollout([episode], 1, 2, 1, (True, False), 4, float(position), (lost,))


def taken(source: RolloutSource, steps: range) -> list[tuple[str, float, int]]:
    """Run the loop's calls; the step, the position and the weights of each rollout."""
    found = []
    for step in steps:
        rollout = source.take(step, silent)
        (episode,) = rollout.episodes
        found.append((episode.problem.messages[0]["content"], rollout.took_s, episode.turns[0][1].version))
        source.finish_generation()
        source.settle(silent)
        source.publish(step)
    return found


def one_step_off(engines: Engines, done: int = 0, saved: Path | None = None) -> OneStepOff:
    source = OneStepOff(engines, engines.refit, done, 6, saved)  # pyrefly: ignore
    source.publish(done)
    return source


WHOLE = [(f"step {step}", 3.0 * (step - 1), max(step - 2, 0)) for step in range(1, 7)]


def test_on_policy_every_rollout_is_sampled_by_the_newest_weights():
    engines = Engines()
    source = OnPolicy(engines, engines.refit, dict)  # pyrefly: ignore
    source.publish(0)
    assert [version for *_, version in taken(source, range(1, 7))] == [0, 1, 2, 3, 4, 5]


def test_one_step_off_they_are_one_step_older_and_none_is_begun_in_vain():
    engines = Engines()
    assert taken(one_step_off(engines), range(1, 7)) == WHOLE
    assert engines.position == 18


def test_the_next_rollout_is_generated_while_a_step_trains():
    engines = Engines()
    source = one_step_off(engines)
    source.take(1, silent)
    engines.began.clear()
    source.settle(silent)
    source.publish(1)
    assert engines.began.wait(5), "rollout 3 has begun before rollout 2 is taken"


@pytest.mark.parametrize("published", [False, True])
def test_a_resumed_run_takes_the_same_rollouts(tmp_path, published):
    """A checkpoint is saved before the step's weights are published, or, where a signal ends the run, after it."""
    engines = Engines()
    source = one_step_off(engines)
    before = taken(source, range(1, 3))
    source.take(3, silent)
    if published:
        source.settle(silent)
        source.publish(3)
    state = source.save(tmp_path)
    # A run that cannot use the saved rollout begins with its prompts.
    assert (state["position"], state["before"]["position"]) == (12, 9)
    again = Engines(state["position"])
    assert [*before, WHOLE[2], *taken(one_step_off(again, 3, tmp_path), range(4, 7))] == WHOLE


def test_a_run_that_begins_from_a_checkpoint_of_on_policy_training(tmp_path):
    assert taken(one_step_off(Engines(9), 3, tmp_path), range(4, 7)) == [
        ("step 4", 9.0, 3),
        ("step 5", 12.0, 3),
        ("step 6", 15.0, 4),
    ]


def test_held_out_problems_wait_for_the_rollout_and_get_the_newest_weights():
    engines = Engines()
    source = one_step_off(engines)
    taken(source, range(1, 3))
    (episode,) = source.held_out(2, silent).episodes
    assert episode.turns[0][1].version == 2
    assert taken(source, range(3, 7)) == WHOLE[2:]


def test_an_error_reaches_the_step_that_waits_for_the_rollout():
    engines = Engines()
    engines.fails_at = 2
    source = one_step_off(engines)
    source.take(1, silent)
    with pytest.raises(EngineError, match="no numbers"):
        source.publish(1)


def test_the_end_of_a_run_leaves_no_thread():
    """Its calls to Ray would start Ray again."""
    ended = threading.Event()

    class Long(Engines):
        def rollout(self, step: int, show) -> Rollout:
            ended.wait(30)
            raise RuntimeError("ended")

        def cancel(self) -> None:
            ended.set()

    engines = Long()
    source = OneStepOff(engines, engines.refit, 0, 6, None)  # pyrefly: ignore
    source.publish(0)
    source.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout"]


def test_a_rollout_that_is_not_json_is_not_saved(tmp_path):
    rollout = make_rollout(3, 6, 2)
    rollout.episodes[0].said[1] |= {"other": {1, 2}}
    save_rollout(rollout, tmp_path)
    rollout = dataclasses.replace(rollout.episodes[0], problem=Problem(chat("?"), "", {(1, 2): 3}))
    with pytest.raises(OSError, match="not JSON"):
        save_rollout(Rollout([rollout], 1, 0), tmp_path)


def test_a_saved_rollout_is_the_same_to_the_bit(tmp_path):
    assert load_rollout(tmp_path) is None
    rollout = make_rollout(3, 6, 2)
    save_rollout(rollout, tmp_path)
    assert dataclasses.asdict(load_rollout(tmp_path)) == dataclasses.asdict(rollout)


def test_ages_count_tokens():
    rollout = make_rollout(3, 6, 2)
    rollout.episodes[0].turns[1] = (6, Completion((9,), (-0.5,), "stop", 1))
    assert rollout.ages(2) == {"trajectory_age_mean": 0.25, "trajectory_age_max": 1.0}
