"""Episodes of several turns: the tokens the policy trains on are exactly those that were sampled."""

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.environments.calculator import Calculator
from nemo_rl_lite.environments.interface import Observation
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.generation.interface import Completion, Sampling
from nemo_rl_lite.rewards.judge import one_by_one
from nemo_rl_lite.rewards.registry import find_reward
from nemo_rl_lite.rollout.rollout import RolloutCollector
from nemo_rl_lite.rollout.turns import Turns

END = 0
SAMPLING = Sampling(1.0, 1.0, None, max_new_tokens=40, stop_token_ids=(END,), stop_strings=(), samples_per_prompt=2)


class Letters:
    """One token a letter; 0 ends a turn; `|` begins the assistant's."""

    end_tokens = (END,)

    def prompt(self, messages):
        return [ord(letter) for letter in f"{messages[-1]['content']}|"]

    def between_turns(self, messages, last_token):
        assert last_token == END
        return [ord(letter) for message in messages for letter in f"{message['content']}|"]

    def text(self, tokens):
        return "".join(chr(token) for token in tokens if token)


class Script:
    """Answers each turn of each sample from a list; keeps what it was asked."""

    def __init__(self, *turns: list[str | None]):
        self.turns, self.asked = list(turns), []

    def generate(self, prompts, sampling):
        self.asked.append((["".join(map(chr, prompt)) for prompt in prompts], sampling))
        texts = self.turns[len(self.asked) - 1]
        assert len(texts) == len(prompts) * sampling.samples_per_prompt
        return [self.completion(text) for text in texts]

    def completion(self, text):
        tokens = [ord(letter) for letter in text.removesuffix("...")] + ([] if text.endswith("...") else [END])
        logprobs = [-(index + 1) / 8 for index in range(len(tokens))]
        return Completion(tuple(tokens), tuple(logprobs), "length" if text.endswith("...") else "stop")


def collect(script, environment, max_turns=4, max_length=200, reward="exact_match"):
    judge = one_by_one(find_reward(reward, {}))
    collector = RolloutCollector(script, Letters(), judge, max_length, 0.0, Turns(environment, max_turns, None))
    return collector.collect([Problem(chat("6*7+1?"), "43")], SAMPLING)


def endings(rollout):
    return [episode.ending for episode in rollout.episodes]


def test_the_calculator_plays_a_whole_episode_beside_one_that_needs_no_tool():
    script = Script(["<calc>6*7</calc>", "44"], ["43"])
    rollout = collect(script, Calculator(role="user"))
    parts = [("6*7+1?|", 0), ("<calc>6*7</calc>\0", 1), ("42|", 0), ("43\0", 1)]
    first, second = rollout.rows([0.0, 0.0])
    assert first.tokens == [ord(letter) for text, _ in parts for letter in text]
    assert first.mask == [bool(mask) for text, mask in parts for _ in text]
    wanted = [-(place + 1) / 8 * mask for text, mask in parts for place in range(len(text))]
    assert first.generation_logprobs == wanted
    assert [len(row.tokens) for row in (first, second)] == [7 + 17 + 3 + 3, 7 + 3] and sum(second.mask) == 3
    assert rollout.rewards_B.tolist() == [1, 0] and [one.response for one in rollout.episodes] == ["43", "44"]
    assert [message["role"] for message in rollout.episodes[0].said] == ["assistant", "user", "assistant"]
    assert rollout.episodes[0].generated == 20 and endings(rollout) == ["stop", "stop"]
    metrics = rollout.metrics()
    assert metrics["avg_turns_per_sample"] == 1.5 and metrics["max_turns_per_sample"] == 2
    assert metrics["mean_env_tokens_per_sample"] == 1.5 and metrics["total_num_tokens"] == 40
    assert metrics["truncation_rate"] == 0 and metrics["natural_termination_rate"] == 1


def test_each_turn_asks_for_all_unfinished_samples_at_once_and_with_a_seed_of_its_own():
    script = Script(["<calc>1</calc>", "<calc>2</calc>"], ["<calc>3</calc>", "0"], ["43"])
    rollout = collect(script, Calculator(role="user"))
    assert [len(prompts) for prompts, _ in script.asked] == [1, 2, 1]
    assert script.asked[1][0] == ["6*7+1?|<calc>1</calc>\x001|", "6*7+1?|<calc>2</calc>\x002|"]
    assert script.asked[2][0] == ["6*7+1?|<calc>1</calc>\x001|<calc>3</calc>\x003|"]
    assert [sampling.samples_per_prompt for _, sampling in script.asked] == [2, 1, 1]
    assert len({sampling.seed for _, sampling in script.asked}) == 3
    assert rollout.rewards_B.tolist() == [1, 0]


def test_an_episode_ends_when_its_turns_are_used_up():
    rollout = collect(Script(["<calc>1</calc>"] * 2, ["<calc>2</calc>", "43"]), Calculator(role="user"), max_turns=2)
    assert endings(rollout) == ["turns", "stop"]
    assert rollout.metrics()["max_turns_reached_rate"] == 0.5
    assert rollout.episodes[0].tokens[-1] == END, "no message follows the last turn"


def test_an_episode_is_truncated_where_the_next_turn_has_no_room():
    # 7 + 15 tokens so far; "1|" and 40 new ones make 64.
    for max_length, turns in ((63, 1), (64, 2)):
        script = Script(["<calc>1</calc>", "43"], ["43"])
        rollout = collect(script, Calculator(role="user"), max_length=max_length)
        assert len(script.asked) == turns
        assert rollout.metrics()["truncation_rate"] == (0.5 if turns == 1 else 0)


def test_a_turn_that_was_cut_is_the_last():
    rollout = collect(Script(["<calc>1</calc> and so on...", "43"]), Calculator(role="user"))
    assert endings(rollout) == ["length", "stop"] and len(rollout.episodes[0].turns) == 1


class Bells:
    """Rewards each turn; ends after the second."""

    def step(self, problem, conversation):
        assert conversation[0] == problem.messages[0] and conversation[-1]["role"] == "assistant"
        rings = conversation[-1]["content"].count("!")
        done = len(conversation) > 2
        return Observation(() if done else ({"role": "user", "content": "again"},), done, rings / 4)


def test_an_environments_rewards_are_added_up_and_nothing_else_is_judged():
    rollout = collect(Script(["ring!", "43"], ["ring!!", "43"]), Bells(), reward="tests.unit.rollout.test_turns.never")
    assert rollout.rewards_B.tolist() == [0.75, 0] and rollout.reward_errors == 0


def never(response: str, answer: str) -> float:
    raise AssertionError("an environment that gives rewards needs no reward function")


class Broken:
    def __init__(self, answer):
        self.answer = answer

    def step(self, problem, conversation):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (KeyError("state"), "KeyError: 'state'"),
        (SystemExit(0), "SystemExit: 0"),
        ("well done", r"TypeError: step\(\) returned str, not an Observation"),
        (Observation(), "no message, although the episode is not done"),
        (Observation(done=True, reward=float("nan")), r"RewardError: step\(\) returned nan"),
    ],
)
def test_an_environment_that_fails_is_named(answer, message):
    with pytest.raises(DataError, match=rf"test_turns.Broken failed after turn 1 of '6\*7\+1\?': .*{message}"):
        collect(Script(["1", "2"]), Broken(answer))
