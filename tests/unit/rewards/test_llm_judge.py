"""A language model judges: what is asked, what its answer is worth, and what happens where there is none."""

import asyncio

import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rewards.judge import RewardCalls, RewardResult, Term, make_judge, try_reward
from nemo_rl_lite.rewards.registry import RewardError, UnavailableReward
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.rewards.endpoint import endpoint

PROBLEM = Problem(chat("the capital of France?", "be brief"), "Paris", {"level": 3})
PROMPT = "{question} {answer} {level}: {response} {{}}"


@pytest.fixture
def server():
    with endpoint() as one:
        yield one


def ask(url, *responses, problem=PROBLEM, **kwargs):
    """What a new process makes of the responses, all at a time."""
    options = {"base_url": url, "model": "m", "prompt": PROMPT, "seconds": 20.0, "max_retries": 0, **kwargs}
    calls = RewardCalls([Term("judge", "judge", options, 1.0, "reward")])

    async def all_of_them():
        found = await asyncio.gather(*(calls.one(response, problem) for response in responses))
        return [one if isinstance(one, RewardError) else one["judge"] for one in found]

    return asyncio.run(all_of_them())


def test_the_model_reads_the_prompt_and_its_score_is_scaled(server):
    server.answer = "At first I thought **score**: 3, but\nScore: 7.5/10"
    assert ask(server.url, "It is {Paris}") == [0.75]
    assert server.asked == ["the capital of France? Paris 3: It is {Paris} {}"]
    assert ask(server.url, "x", worst=10.0, best=5.0) == [0.5]
    assert ask(server.url, "x", score_pattern=r"thought \**(\w+)") == [UNSCORED]
    server.answer = "Score: 77"
    (beyond,) = ask(server.url, "x")
    assert str(beyond) == "the judge's score 77 is not between 0 and 10"
    server.answer = None
    (textless,) = ask(server.url, "x")
    assert "answered without a text" in str(textless) and not isinstance(textless, UnavailableReward)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("Score: -10", 0.0), ("**Score:** -5", 0.25), ("Score (-10 to 10): 5", 0.75), ("Score = 10/10", 1.0)],
)
def test_a_score_may_be_negative_and_its_range_may_be_repeated(server, text, reward):
    server.answer = text
    assert ask(server.url, "x", worst=-10.0, best=10.0) == [reward]


class Unscored:
    def __eq__(self, other):
        return type(other) is RewardError and str(other).startswith("the judge's answer has no score; it ends ")


UNSCORED = Unscored()


def test_equal_requests_are_sent_once(server, tmp_path):
    assert ask(server.url, "a", "a", "b", "a") == [0.8] * 4
    assert len(server.asked) == 2
    kept = str(tmp_path / "answers.sqlite")
    for _ in range(2):
        # The second is another run.
        assert ask(server.url, "a", "b", cache_path=kept) == [0.8] * 2
    assert len(server.asked) == 4
    server.answer = "Score: 1"
    assert ask(server.url, "a", cache_path=kept) == [0.8]
    assert ask(server.url, "a", cache_path=kept, best=8.0) == [1.0], "the answer is kept, not the reward"
    assert ask(server.url, "a", cache_path=kept, sampling={"temperature": 1.0}) == [0.1], "another request"
    assert ask(server.url, "a", cache_path=kept, model="other") == [0.1]
    assert len(server.asked) == 6


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("hang", "gave no answer: Request timed out"),
        ("fail", "gave no answer: Error code: 500"),
        ("html", "gave an answer that is not a chat completion: '<html></html>'"),
    ],
)
def test_an_endpoint_without_an_answer_is_an_error_of_the_sample(server, mode, told):
    server.mode = mode
    (error,) = ask(server.url, "a", seconds=0.5 if mode == "hang" else 20.0)
    assert isinstance(error, UnavailableReward) and told in str(error)
    assert str(error).startswith(f"the judge m at {server.url} ")


def test_an_endpoint_that_is_gone_is_named_without_its_password(server):
    server.close()
    (error,) = ask(server.url.replace("127", "me:secret@127"), "a")
    why = "gave no answer: Connection error. (All connection attempts failed)"
    assert str(error) == f"the judge m at {server.url} {why}"


def test_the_key_comes_from_a_variable_and_no_other_is_sent(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-somebody-else")
    monkeypatch.setenv("OWN_KEY", "sesame")
    ask(server.url, "a")
    assert server.keys.pop() == "Bearer none"
    ask(server.url, "a", api_key_env="OWN_KEY")
    assert server.keys.pop() == "Bearer sesame"
    (error,) = ask(server.url, "a", api_key_env="NO_SUCH_KEY")
    assert isinstance(error, UnavailableReward) and "variable NO_SUCH_KEY (api_key_env) is not set" in str(error)


def command(url, *overrides):
    own = [f"reward.kwargs.base_url={url}", "reward.kwargs.model=m", "reward.kwargs.max_retries=0"]
    return compose_config(["reward=judge", *own, *overrides]).reward


def test_a_run_judges_in_a_process_of_its_own(server):
    server.answer = lambda prompt: "Score: 10" if "Response:\n42" in prompt else "Score: 0"
    judge = make_judge(command(server.url))

    async def both():
        return await asyncio.gather(*(judge(response, PROBLEM) for response in ("42", "43")))

    assert asyncio.run(both()) == [RewardResult(1.0), RewardResult(0.0)]
    # Another event loop, as each rollout has one.
    assert asyncio.run(both()) == [RewardResult(1.0), RewardResult(0.0)]
    assert len(server.asked) == 2


def test_a_run_does_not_start_where_the_endpoint_is_not_there(server, capsys):
    server.answer = "no score"
    try_reward(make_judge(command(server.url)), PROBLEM)
    assert "note: a trial call of the reward failed: the judge's answer has no score" in capsys.readouterr().err
    server.close()
    told = rf"(?s)reward\.name\n +the judge m at {server.url} gave no answer.*fix: .*reward\.kwargs"
    with pytest.raises(ConfigError, match=told):
        try_reward(make_judge(command(server.url)), PROBLEM)


def test_a_judge_may_be_a_term(server):
    kwargs = f"{{base_url: '{server.url}', model: m, prompt: '{{response}}'}}"
    style = "+reward.terms.style"
    config = compose_config(
        ["reward.timeout_s=180", f"{style}.name=judge", f"{style}.weight=0.5", f"{style}.kwargs={kwargs}"]
    )
    verdict = asyncio.run(make_judge(config.reward)("Paris", PROBLEM))
    assert verdict == RewardResult(1 + 0.5 * 0.8, {"exact_match": 1.0, "style": 0.8})
    server.close()
    with pytest.raises(ConfigError, match=r"reward\.terms\.style\.name"):
        try_reward(make_judge(config.reward), PROBLEM)
