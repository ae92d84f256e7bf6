"""Episodes of several turns: the tokens the policy trains on are exactly those that were sampled."""

import asyncio
from dataclasses import replace
from typing import ClassVar

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.environments.registry import InThisProcess, try_environment
from nemo_rl_lite.errors import ConfigError, DataError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.rewards.registry import find_reward
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutTask
from nemo_rl_lite.rollout.episode import EpisodeRecord
from nemo_rl_lite.rollout.play import Turns
from tests.unit.rollout.script import END, Script, collected_by, judged_by

HERE = "tests.unit.rollout.test_turns"
SAMPLING = Sampling(1.0, 1.0, None, max_new_tokens=40, stop_token_ids=(END,), stop_strings=())
CALCULATOR = ("calculator", {"role": "user"})


def collect(script, environment, max_turns=4, max_length=200, reward="exact_match", max_failure_fraction=0.0):
    judge = judged_by(find_reward(reward, {}))
    turns = Turns(InThisProcess(*environment), max_turns)
    collector = collected_by(script, judge, max_length, ErrorShares(0.0, max_failure_fraction), turns)
    return collector.collect(RolloutTask([Problem(chat("6*7+1?"), "43")].__getitem__, 1, 2, SAMPLING, 5))


def endings(rollout):
    return [episode.ending for episode in rollout.episodes]


def test_the_calculator_plays_a_whole_episode_beside_one_that_needs_no_tool():
    script = Script(["<calc>6*7</calc>", "44"], ["43"])
    rollout = collect(script, CALCULATOR)
    parts = [("6*7+1?|", 0), ("<calc>6*7</calc>\0", 1), ("42|", 0), ("43\0", 1)]
    first, second = rollout.rows([0.0, 0.0], 0)
    assert first.tokens.tolist() == [ord(letter) for text, _ in parts for letter in text]
    assert first.mask.tolist() == [bool(mask) for text, mask in parts for _ in text]
    wanted = [-(place + 1) / 8 * mask for text, mask in parts for place in range(len(text))]
    assert first.generation_logprobs.tolist() == wanted
    assert [len(row.tokens) for row in (first, second)] == [7 + 17 + 3 + 3, 7 + 3] and sum(second.mask) == 3
    assert rollout.rewards_B.tolist() == [1, 0] and [one.response for one in rollout.episodes] == ["43", "44"]
    assert [message["role"] for message in rollout.episodes[0].said] == ["assistant", "user", "assistant"]
    assert rollout.episodes[0].generated == 20 and endings(rollout) == ["stop", "stop"]
    metrics = rollout.metrics()
    assert metrics["avg_turns_per_sample"] == 1.5 and metrics["max_turns_per_sample"] == 2
    assert metrics["mean_env_tokens_per_sample"] == 1.5 and metrics["total_num_tokens"] == 40
    assert metrics["truncation_rate"] == 0 and metrics["natural_termination_rate"] == 1


def test_a_conversation_lasts_as_long_as_its_episode():
    """The queue keeps a place in a full cache for it."""
    script = Script(["<calc>6*7</calc>", "44"], ["43"])
    collect(script, CALCULATOR)
    assert script.ended_before == [False] * 3
    assert [(one.ended, one.tokens) for one in script.conversations.values()] == [(True, 30), (True, 10)]


def test_a_conversation_whose_environment_fails_has_ended():
    script = Script(["1", "2"])
    with pytest.raises(DataError):
        collect(script, (f"{HERE}.Broken", {"answer": KeyError("state")}))
    assert [one.ended for one in script.conversations.values()] == [True, True]


def test_each_response_has_a_seed_of_its_own_which_a_repetition_gives_again():
    def asked():
        script = Script(["<calc>1</calc>", "<calc>2</calc>"], ["<calc>3</calc>", "0"], ["43"])
        assert collect(script, CALCULATOR).rewards_B.tolist() == [1, 0]
        return script.asked

    turns = asked()
    texts = [["".join(map(chr, request.prompt)) for request in turn] for turn in turns]
    assert texts == [
        ["6*7+1?|"] * 2,
        ["6*7+1?|<calc>1</calc>\x001|", "6*7+1?|<calc>2</calc>\x002|"],
        ["6*7+1?|<calc>1</calc>\x001|<calc>3</calc>\x003|"],
    ]
    assert len({request.seed for turn in turns for request in turn}) == 5 and asked() == turns


def test_an_episode_ends_when_its_turns_are_used_up():
    rollout = collect(Script(["<calc>1</calc>"] * 2, ["<calc>2</calc>", "43"]), CALCULATOR, max_turns=2)
    assert endings(rollout) == ["turns", "stop"]
    assert rollout.metrics()["max_turns_reached_rate"] == 0.5
    assert rollout.episodes[0].tokens[-1] == END, "no message follows the last turn"


def test_an_episode_is_truncated_where_the_next_turn_has_no_room():
    # 7 + 15 tokens so far; "1|" and 40 new ones make 64.
    for max_length, turns in ((63, 1), (64, 2)):
        script = Script(["<calc>1</calc>", "43"], ["43"])
        rollout = collect(script, CALCULATOR, max_length=max_length)
        assert sum(map(bool, script.asked)) == turns
        assert rollout.metrics()["truncation_rate"] == (0.5 if turns == 1 else 0)


def test_a_turn_that_was_cut_is_the_last():
    rollout = collect(Script(["<calc>1</calc> and so on...", "43"]), CALCULATOR)
    assert endings(rollout) == ["length", "stop"] and len(rollout.episodes[0].turns) == 1


class Bells:
    """Rewards each turn; ends after the second."""

    def step(self, problem, conversation):
        assert conversation[0] == problem.messages[0] and conversation[-1]["role"] == "assistant"
        rings = conversation[-1]["content"].count("!")
        done = len(conversation) > 2
        return Observation(() if done else ({"role": "user", "content": "again"},), done, rings / 4)


def test_an_environments_rewards_are_added_up_and_nothing_else_is_judged():
    rollout = collect(Script(["ring!", "43"], ["ring!!", "43"]), (f"{HERE}.Bells", {}), reward=f"{HERE}.never")
    assert rollout.rewards_B.tolist() == [0.75, 0] and rollout.reward_errors == 0


class Counter(Bells):
    """Reports the number of turns so far, and once how many rang."""

    def step(self, problem, conversation):
        rings = conversation[-1]["content"].count("!")
        metrics = {"turns": len(conversation) // 2} | ({"rings": rings} if rings else {})
        return replace(super().step(problem, conversation), metrics=metrics)


def test_an_environments_metrics_are_means_over_the_episodes_that_report_them():
    rollout = collect(Script(["ring!", "43"], ["no", "43"]), (f"{HERE}.Counter", {}))
    assert [one.metrics for one in rollout.episodes] == [{"turns": 2, "rings": 1}, {"turns": 2}]
    kept = {name: value for name, value in rollout.metrics().items() if name.startswith("episode/")}
    assert kept == rollout.episode_metrics() == {"episode/turns": 2, "episode/rings": 1}
    records = [EpisodeRecord.of(one, 0, number) for number, one in enumerate(rollout.episodes)]
    assert replace(rollout, episodes=records).episode_metrics() == kept


class Patient(Bells):
    """Has no reward before the episode is over, however it ends."""

    def step(self, problem, conversation):
        done = conversation[-1]["content"] == "43"
        return Observation(() if done else ({"role": "user", "content": "again"},), done, 1.0 if done else None)

    def cut_short(self, problem, conversation):
        wrong = {"nothing": None, "nonsense": "good"}
        return wrong.get(conversation[-1]["content"], -0.5)


@pytest.mark.parametrize(
    ("turns", "max_turns", "max_length", "reward", "ending"),
    [
        (["42"], 1, 200, -0.5, "turns"),
        (["42"], 4, 51, -0.5, "length"),
        (["42..."], 4, 200, -0.5, "length"),
        (["43"], 1, 200, 1.0, "stop"),
        # Without a reward of the environment the configured one judges.
        (["nothing"], 1, 200, 0.0, "turns"),
    ],
)
def test_an_episode_that_the_environment_is_not_done_with_is_cut_short(turns, max_turns, max_length, reward, ending):
    rollout = collect(Script(turns * 2), (f"{HERE}.Patient", {}), max_turns=max_turns, max_length=max_length)
    assert rollout.rewards_B.tolist() == [reward] * 2 and endings(rollout) == [ending] * 2


def never(response: str, answer: str) -> float:
    raise AssertionError("an environment that gives rewards needs no reward function")


class Broken:
    def __init__(self, answer):
        self.answer = answer

    def step(self, problem, conversation):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer if conversation[-1]["content"] == "1" else Observation(done=True)


def said(*messages, **others):
    return Observation(messages, **others)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (KeyError("state"), "KeyError: 'state'"),
        (SystemExit(0), "SystemExit: 0"),
        (ValueError("no \x1b[2J\n"), r"ValueError: no \\x1b\[2J\\n$"),
        ("well done", r"TypeError: step\(\) returned str, not an Observation"),
        (Observation(done=True, reward=float("nan")), r"RewardError: step\(\) returned nan"),
        (said({"role": "assistant", "content": "43"}), "a message is a dict with a role of user, tool, system"),
    ],
)
def test_an_environment_that_fails_ends_the_run_above_a_share(answer, message):
    with pytest.raises(DataError, match=rf"the environment failed on [12] of 2 samples, .*fraction = 0.*{message}"):
        collect(Script(["1", "2"]), (f"{HERE}.Broken", {"answer": answer}))


class Misspelt:
    def step(self, problem, conversation):
        return Observation(done=True, reward=len(convresation))  # noqa: F821


def test_a_fault_in_the_code_ends_the_run_whatever_share_may_fail():
    with pytest.raises(DataError, match=r"environment.name: NameError: .*convresation.* \(test_turns.py, line \d+\)"):
        collect(Script(["1", "2"]), (f"{HERE}.Misspelt", {}), max_failure_fraction=1.0)
    environments, problem = InThisProcess(f"{HERE}.Misspelt", {}), Problem(chat("?"), "1")
    with pytest.raises(ConfigError, match=r"environment.name.*\n.*NameError"):
        try_environment(environments, "mine", problem)
    try_environment(InThisProcess(f"{HERE}.Broken", {"answer": KeyError("state")}), "mine", problem)


class Unsaved:
    """Has a state that cannot be saved."""

    def step(self, problem, conversation):
        return Observation(({"role": "user", "content": "on"},))

    def state(self):
        return {"self": self}

    def restore(self, state): ...


def test_a_state_that_cannot_be_saved_is_an_error_before_the_run():
    environments = InThisProcess(f"{HERE}.Unsaved", {})
    assert environments.resumption == "snapshot"
    with pytest.raises(ConfigError, match=r"state\(\) of the environment returned neither JSON nor bytes"):
        try_environment(environments, "mine", Problem(chat("?"), "1"))


def test_below_that_share_its_episode_alone_is_left_out(caplog):
    broken = (f"{HERE}.Broken", {"answer": "well done"})
    rollout = collect(Script(["1", "43"]), broken, max_failure_fraction=0.5)
    assert endings(rollout) == ["error", "stop"] and [one.reward for one in rollout.episodes] == [None, 1]
    assert rollout.metrics()["environment_errors"] == 1 and rollout.metrics()["num_valid_samples"] == 1
    assert not any(rollout.rows([0.0, 0.0], 0)[0].mask)
    assert "the environment failed on '1' (answer '43'): TypeError" in caplog.text


class Slow:
    """Answers a `go` at once and a `wait` late."""

    turns: ClassVar[list[str]] = []

    async def step(self, problem, conversation):
        if conversation[-1]["content"] == "wait":
            while len(self.turns) < 2:
                await asyncio.sleep(0.001)
        self.turns.append(conversation[-1]["content"])
        return Observation(({"role": "user", "content": "again"},), done=conversation[-1]["content"] == "43")


def test_no_episode_waits_for_another():
    """The second episode has its second turn before the first one's tool has answered."""
    rollout = collect(Script(["wait", "go"], ["43", "43"]), (f"{HERE}.Slow", {}))
    assert Slow.turns == ["go", "43", "wait", "43"] and rollout.rewards_B.tolist() == [1, 1]
    first = rollout.episodes[0]
    assert [span.what for span in first.spans] == ["generate", "environment", "generate", "environment", "reward"]
    assert first.seconds("environment") > rollout.episodes[1].seconds("environment") > 0
