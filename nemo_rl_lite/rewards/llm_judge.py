"""LLM-as-a-judge reward: ask a model at an OpenAI-compatible endpoint for a score."""

import asyncio
import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from nemo_rl_lite.config.schema_algorithm import STRICT, NonNegativeInt, PositiveFloat
from nemo_rl_lite.data.problems import Problem
from nemo_rl_lite.data.rows import filled, template_columns
from nemo_rl_lite.errors import DataError
from nemo_rl_lite.rewards.registry import RewardError, UnavailableReward

# Seconds to wait for another process' write.
_LOCK_S = 60.0


class Answers:
    """Cache of answers by request: a table in a file that processes and later runs share, or a temporary one."""

    def __init__(self, path: str | None):
        """Raises UnavailableReward: the file cannot be used."""
        try:
            self._database = sqlite3.connect(path or "", timeout=_LOCK_S, autocommit=True)
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )
        except sqlite3.Error as error:
            raise UnavailableReward(f"the cache of answers {path} (cache_path) cannot be used: {error}") from error

    def get(self, request: str) -> str | None:
        row = self._database.execute("SELECT answer FROM answers WHERE request = ?", (request,)).fetchone()
        return None if row is None else row[0]

    def put(self, request: str, answer: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (request, answer))


def _is_address(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]\S*", text):
        raise ValueError("must be a URL, such as http://localhost:8000/v1")
    return text


def _asks_about_the_response(text: str) -> str:
    try:
        names = template_columns(text)
    except ValueError as error:
        rule = "must be a text with fields such as {response}, and plain braces written as {{ and }}"
        raise ValueError(f"{rule}: {error}") from None
    if "response" not in names:
        raise ValueError("must be a text with the field {response}")
    return text


def _finds_one_group(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"must be a regular expression with one group, the score; this has {groups}")
    return text


@dataclass(frozen=True, config=STRICT)
class JudgeOptions:
    """`reward.kwargs` of the judge; see configs/reward/judge.yaml."""

    base_url: Annotated[str, AfterValidator(_is_address)]
    model: Annotated[str, Field(min_length=1)]
    prompt: Annotated[str, AfterValidator(_asks_about_the_response)]
    score_pattern: Annotated[str, AfterValidator(_finds_one_group)] = (
        r"(?i)score(?:\s*\([^)]*\))?[^\w-]*(-?\d+(?:\.\d+)?)"
    )
    worst: float = 0.0
    best: float = 10.0
    sampling: dict[str, Any] = Field(default_factory=dict)
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    seconds: PositiveFloat = 60.0
    max_retries: NonNegativeInt = 2
    cache_path: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_a_range(self) -> "JudgeOptions":
        if self.best == self.worst:
            raise ValueError("must be a range of scores: best and worst are equal")
        return self


class LLMJudge:
    """Rewards a response by a model's score, scaled so that `worst` is 0 and `best` is 1. Equal requests share an
    answer."""

    def __init__(self, **kwargs: Any):
        """Raises UnavailableReward: the kwargs do not fit `JudgeOptions`, the key's variable is not set, or the cache
        cannot be used."""
        # Takes a second.
        from openai import AsyncOpenAI

        try:
            self._options = options = JudgeOptions(**kwargs)
        except ValidationError as error:
            raise UnavailableReward(f"the judge's kwargs are invalid: {error}") from None
        key = os.environ.get(options.api_key_env) if options.api_key_env else "none"
        if not key:
            raise UnavailableReward(f"the environment variable {options.api_key_env} (api_key_env) is not set")
        self._client = AsyncOpenAI(
            api_key=key, base_url=options.base_url, timeout=options.seconds, max_retries=options.max_retries
        )
        self._answers = Answers(options.cache_path)
        self._asked: dict[str, asyncio.Task[str]] = {}
        address = urlsplit(options.base_url)
        # Without credentials.
        self._shown = f"{options.model} at {address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"

    async def __call__(self, response: str, answer: str, problem: Problem) -> float:
        """Ask for the score of a response.

        Raises:
            RewardError: the model's answer has no score, or one out of range.
            UnavailableReward: there is no answer after the retries, or the row lacks a column of the prompt.
        """
        own = {"question": problem.messages[-1]["content"], "response": response, "answer": answer}
        try:
            prompt = filled(self._options.prompt, {**problem.metadata, **own}, "the prompt of the judge")
        except DataError as error:
            raise UnavailableReward(str(error)) from None
        request = {
            "model": self._options.model,
            "messages": [{"role": "user", "content": prompt}],
            # null means the endpoint's default.
            **{name: value for name, value in self._options.sampling.items() if value is not None},
        }
        key = hashlib.sha256(json.dumps([self._options.base_url, request], sort_keys=True).encode()).hexdigest()
        text = self._answers.get(key)
        if text is not None:
            return self._reward(text)
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._ask(request))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
        # Other samples may wait for the same answer.
        text = await asyncio.shield(self._asked[key])
        reward = self._reward(text)
        # Only valid answers are cached.
        self._answers.put(key, text)
        return reward

    async def _ask(self, request: Mapping[str, Any]) -> str:
        from openai import OpenAIError

        try:
            said: Any = await self._client.chat.completions.create(**request)
        except (OpenAIError, TypeError, ValueError) as error:  # a wrong argument, no JSON
            # The message of a connection error lacks its cause.
            why = f"{error} ({error.__cause__})" if str(error.__cause__ or "") else str(error) or type(error).__name__
            raise UnavailableReward(f"the judge {self._shown} gave no answer: {why}") from error
        try:
            text = said.choices[0].message.content
        except (AttributeError, IndexError, TypeError):
            rule = "gave an answer that is not a chat completion"
            raise UnavailableReward(f"the judge {self._shown} {rule}: {said!r:.80}") from None
        if not isinstance(text, str):
            raise RewardError(f"the judge {self._shown} answered without a text")
        return text

    def _reward(self, text: str) -> float:
        found, options = re.findall(self._options.score_pattern, text), self._options
        try:
            score = float(found[-1])
        except (IndexError, ValueError):
            raise RewardError(f"the judge's answer has no score; it ends {text[-80:]!r}") from None
        if not min(options.worst, options.best) <= score <= max(options.worst, options.best):
            raise RewardError(f"the judge's score {score:g} is not between {options.worst:g} and {options.best:g}")
        return (score - options.worst) / (options.best - options.worst)
