"""Whole runs that a language model judges, with an endpoint that fails on some requests, or is gone."""

import json
import re

import pytest

from tests.functional.here import run_here, train_here
from tests.unit.rewards.endpoint import endpoint

pytestmark = pytest.mark.functional

SMALL = (
    "generation=transformers",
    "algorithm.num_prompts_per_step=4",
    "policy.train_global_batch_size=32",
    "algorithm.val_at_start=false",
    "algorithm.val_at_end=false",
    "algorithm.val_period=0",
    "logger.plots=false",
)
JUDGED = re.compile(r"Reference answer:\n(.*?)\n\nResponse:\n(.*?)\n\nCompare", re.DOTALL)


@pytest.fixture
def server():
    """An endpoint whose scores follow from the response."""
    with endpoint() as one:
        one.answer = lambda prompt: f"Score: {sum(map(ord, JUDGED.search(prompt)[2])) % 11}"
        yield one


def judged(server, steps: int, *more: str) -> list[str]:
    own = [f"reward.kwargs.base_url={server.url}", "reward.kwargs.model=m", "reward.kwargs.max_retries=0"]
    return [*SMALL, f"algorithm.max_num_steps={steps}", "reward=judge", *own, *more]


def some_fail(prompt: str) -> str:
    """A mode for each prompt. The trial, which has the right answer, is judged."""
    answer, response = JUDGED.search(prompt).groups()
    ways = ["fail", "nonsense", "html", "answer", "answer", "answer"]
    return "answer" if response == answer else ways[sum(map(ord, response)) % len(ways)]


def test_a_judge_that_fails_on_some_samples_costs_these_and_is_asked_nothing_twice(server, tmp_path, model_folder):
    more = (f"reward.kwargs.cache_path={tmp_path}/answers.sqlite", "reward.max_failure_fraction=0.9")
    server.mode = some_fail
    _, first = train_here(tmp_path / "first", model_folder, *judged(server, 2, *more))
    failed = [line["train/reward_errors"] for line in first if "train/reward_errors" in line]
    assert len(failed) == 2 and 0 < sum(failed) < 64
    good = [prompt for prompt in server.asked if some_fail(prompt) == "answer"]
    assert len(good) == len(set(good)) > 10
    # The same run again, while the endpoint answers nothing.
    server.mode, asked = "fail", len(server.asked)
    _, again = train_here(tmp_path / "again", model_folder, *judged(server, 2, *more))
    rewards = [[line["train/reward"] for line in lines if "train/reward" in line] for lines in (first, again)]
    assert len(rewards[0]) == 2 and rewards[0] == rewards[1]
    assert not set(server.asked[asked:]) & set(good)


def test_a_judge_that_is_gone_in_a_run_ends_it_with_its_address(server, tmp_path, model_folder):
    def gone_in_the_second_step(prompt: str) -> str:
        if len(server.asked) <= 40:
            return "answer"
        server.close()
        return "hang"

    server.mode = gone_in_the_second_step
    folder = tmp_path / "run"
    done = run_here(folder, model_folder, *judged(server, 9))
    assert done.returncode != 0 and "Traceback" not in done.stderr
    told = r"the reward failed on \d+ of \d+ samples, more than the share reward\.max_failure_fraction = 0\.25"
    assert re.search(rf"{told}; first with the judge m at {server.url} gave no answer", done.stderr)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 1
