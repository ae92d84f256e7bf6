"""The code of docs/extending.md and docs/rewards.md does what the pages say."""

import asyncio
import importlib
import json
import sys
from types import ModuleType

import pytest
import torch

from nemo_rl_lite.config.schema import EnvironmentConfig
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.data.formats import CHATS, PROBLEMS
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.sources import training_set, validation_set
from nemo_rl_lite.data.tasks import TASKS
from nemo_rl_lite.environments.registry import check_environment, find_environment
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import Loss, combine_metrics, make_loss, needs_of
from nemo_rl_lite.rewards.judge import RewardResult, make_judge
from nemo_rl_lite.rewards.registry import find_batch_reward, find_reward
from nemo_rl_lite.validation.compose import compose_config
from tests.unit.losses.batches import batch_of, rows_of
from tests.unit.pages import DOCS, blocks, commands
from tests.unit.rewards.endpoint import endpoint

PAGES = (DOCS / "extending.md", DOCS / "rewards.md")
COMMANDS = [words for page in PAGES for words in commands(page)]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The pages' `my_package`, in the folder that the reader is in."""
    for text in [text for page in PAGES for text in blocks(page, "python")]:
        file = tmp_path / text.splitlines()[0].removeprefix("# ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"my_package.{name}")


def problem(answer: str, **metadata: object) -> Problem:
    return Problem(({"role": "user", "content": "?"},), answer, metadata)


def test_every_command_of_the_pages_composes(package):
    module("capitals").main("capitals.jsonl")
    module("programs").main("programs.jsonl")
    composed = [compose_config(words[2:]) for words in COMMANDS if words[:2] == ["nrl-lite", "train"]]
    assert len(composed) == 13
    assert composed[0].reward.name == "my_package/rewards.py:short_and_right"
    assert composed[9].reward.terms["digits"].weight == 0.1
    for config in composed:
        # Every reward of the pages can be found and called.
        make_judge(config.reward)


def test_the_rewards(package):
    short = find_reward("my_package.rewards.short_and_right", {"limit": 10})
    assert short("it is Paris", problem("paris")) == pytest.approx(1 - 0.1)
    assert short("Rome", problem("paris")) == 0.0
    close = find_reward("my_package.rewards.close_enough", {})
    assert close("3.2", problem("3", tolerance="0.25")) == 1.0
    assert close("3.3", problem("3", tolerance="0.25")) == 0.0


def test_the_batched_reward(package):
    rewards = find_batch_reward("my_package/overlap.py:SharedLetters", {"device": "cpu"})
    found = asyncio.run(rewards(["a pair", "", "is"], [problem("Paris"), problem("Paris"), problem("is")]))
    assert found == pytest.approx([3 / 5, 0.0, 1.0])


def test_the_judges(package):
    with endpoint() as server:
        for command, reward in (("reward=judge", 0.8), ("reward=exact_match", 1 + 0.3 * 0.8)):
            words = next(words for words in COMMANDS if command in words and "8000" in " ".join(words))
            here = [word.replace("http://localhost:8000/v1", server.url) for word in words[2:]]
            verdict = asyncio.run(make_judge(compose_config(here).reward)("Paris", problem("Paris")))
            assert isinstance(verdict, RewardResult) and verdict.reward == pytest.approx(reward)
        assert "Paris" in server.asked[0] and server.asked[1].startswith("Is this brief and polite? Paris End")


def test_code_as_the_response(package, tmp_path):
    module("programs").main("programs.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "programs.jsonl").read_text().splitlines()]
    (words,) = [words for words in COMMANDS if "reward=program" in words]
    judge, third = make_judge(compose_config(words[2:]).reward), problem("", tests=rows[2]["tests"])
    for program, reward in (("add = lambda x: x + 3", 1.0), ("def add(x): return x", 0.5), ("0", 0.0)):
        verdict = asyncio.run(judge(f"```python\n{program}\n```", third))
        assert isinstance(verdict, RewardResult) and verdict.reward == reward


def test_the_environment(package):
    name, kwargs = "my_package.guessing.Guessing", {"cost": 0.1}
    check_environment(EnvironmentConfig(name, None, 8, 2, 0.5, kwargs, 6))
    made = find_environment(name)(**kwargs)
    assert made is not None

    def said(guess: str) -> list:
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": guess}]

    low, right, other = (made.step(problem("7"), said(guess)) for guess in ("3", "7", "seven"))
    assert low.messages == ({"role": "user", "content": "higher"},) and low.reward == -0.1 and not low.done
    assert right.done and right.reward == 1.0
    assert other.done and other.reward == 0.0


def calls(name: str, **arguments: str) -> list:
    called = {"id": "call0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [called]}]


def test_the_tool(package):
    kwargs = {"tools": ["my_package.digits.reverse"], "max_characters": 100}
    (tool,) = check_environment(EnvironmentConfig("tools", None, 8, 2, 0.5, kwargs, 6))
    assert tool["function"]["parameters"]["required"] == ["digits"]
    made = find_environment("tools")(**kwargs)
    answers = [asyncio.run(made.step(problem("7"), calls("reverse", digits=digits))) for digits in ("123", "x")]
    assert [one.messages[0]["content"] for one in answers] == ["321", "error: ValueError: 'x' are no digits"]


def test_the_agent(package):
    name, kwargs = "my_package.safe.Safe", {"cost": 0.1}
    (tool,) = check_environment(EnvironmentConfig(name, None, 8, 2, 0.5, kwargs, 6))
    assert tool["function"]["name"] == "turn"
    made = find_environment(name)(**kwargs)
    turns = [calls("turn", digits="425"), calls("turn", digits="415"), [{"role": "assistant", "content": "done"}]]
    first, second, last = [asyncio.run(made.step(problem("415"), turn)) for turn in turns]
    assert [one.messages[0]["content"] for one in (first, second)] == ["2 in place", "open"]
    assert last.done and last.reward == pytest.approx(0.8)
    assert asyncio.run(find_environment(name)(**kwargs).cut_short(problem("415"), [])) == 0.0


def test_the_rows(package):
    module("capitals").main("capitals.jsonl")
    command = next(words for words in COMMANDS if "data.train_path=capitals.jsonl" in words)
    config = compose_config(command[2:])
    everything = training_set(config.data, 1, PROBLEMS).finite()
    held_out = validation_set(config.data, 10, PROBLEMS)
    assert len(everything) + len(held_out) == 8 and held_out
    asked = {one.messages[0]["content"]: one.answer for one in [*everything, *held_out]}
    assert asked["What is the capital of Kenya? One word."] == "Nairobi"


def test_the_map_of_rows(package):
    module("capitals").main("capitals.jsonl")
    command = next(words for words in COMMANDS if "data.map=my_package/rows.py:short_names" in words)
    data = compose_config(command[2:]).data
    kept = [*training_set(data, 1, PROBLEMS).finite(), *validation_set(data, 10, PROBLEMS)]
    asked = {one.messages[0]["content"].split()[5] for one in kept}
    assert asked == {"CHILE?", "CUBA?", "EGYPT?", "GHANA?", "JAPAN?", "KENYA?", "PERU?"}


def test_the_task(package, monkeypatch):
    monkeypatch.setitem(TASKS, "doubling", module("doubling").Doubling)
    config = compose_config(["data.name=doubling", "data.task_kwargs={}"])
    training = training_set(config.data, 1, PROBLEMS)
    seen = [training.problem(place) for place in range(200)]
    assert seen == [training.problem(place) for place in range(200)]
    held_out = {one.answer for one in validation_set(config.data, 300, PROBLEMS)}
    assert len(held_out) == 143 and not held_out & {one.answer for one in seen}
    chat = training_set(config.data, 1, CHATS).problem(0)
    assert json.dumps(chat.conversations[0].messages[-1]) == json.dumps(
        {"role": "assistant", "content": seen[0].answer}
    )


def made_by(command: str) -> tuple[Loss, GRPOConfig]:
    """The loss of the page's command that names it, and the options it is made with."""
    words = next(words for words in COMMANDS if any(command in word for word in words))
    options = compose_config(words[2:]).options(GRPOConfig)
    return make_loss(options), options


def test_the_loss_does_not_depend_on_micro_batches(package):
    loss, options = made_by("cispo")
    assert loss == module("cispo").CISPOLoss(options, limit=5.0)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "mask": (torch.rand(6, 5, generator=generator) > 0.3).float(),
        "previous_logprobs": -torch.rand(6, 5, generator=generator),
        "advantages": torch.randn(6, generator=generator),
    }
    logprobs_BT = (-2 * torch.rand(6, 5, generator=generator)).requires_grad_()
    batch, counts = batch_of(tensors), loss.counts(rows_of(tensors["mask"]))
    whole, metrics = loss(logprobs_BT, batch, counts)
    (gradient,) = torch.autograd.grad(whole, logprobs_BT)
    ratio = (logprobs_BT.detach() - batch.previous_logprobs).exp().clamp(max=5.0)
    expected = -ratio * batch.advantages[:, None] * batch.mask / batch.mask.sum()
    torch.testing.assert_close(gradient, expected)
    parts = []
    for rows in (slice(0, 2), slice(2, 6)):
        _, part = loss(logprobs_BT[rows], batch.rows(rows), counts)
        parts.append({name: value.item() for name, value in part.items()})
    combined = combine_metrics(parts)
    assert combined["loss"] == pytest.approx(metrics["loss"].item())
    assert combined["ratio_max"] == pytest.approx(metrics["ratio_max"].item())


def test_the_entropy_bonus(package):
    loss, options = made_by("entropy")
    assert loss.weight == 0.01 and needs_of(loss) == {"entropy"}
    names = ("previous_logprobs", "generation_logprobs", "reference_logprobs", "entropy")
    mask_BT = torch.tensor([[0.0, 1, 1], [0, 1, 0]])
    batch = batch_of({name: torch.full((2, 3), 0.5) for name in names} | {"mask": mask_BT, "advantages": torch.ones(2)})
    counts = loss.counts(rows_of(mask_BT))
    total, metrics = loss(torch.full((2, 3), 0.5), batch, counts)
    plain, _ = GRPOLoss(options.loss_fn)(torch.full((2, 3), 0.5), batch, counts)
    assert total.item() == metrics["loss"].item() == pytest.approx(plain.item() - 0.01 * 0.5)
    assert metrics["entropy"].item() == pytest.approx(0.5)
