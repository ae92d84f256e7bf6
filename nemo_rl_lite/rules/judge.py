"""Rules about a language model that judges."""

from collections.abc import Iterator
from dataclasses import fields

from pydantic import ValidationError

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import RolloutAlgorithmConfig
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.rewards.judge import Term, terms_of
from nemo_rl_lite.rewards.llm_judge import JudgeOptions
from nemo_rl_lite.rules.base import rule
from nemo_rl_lite.rules.type_errors import described


@rule("reward", options=RolloutAlgorithmConfig)
def judges_can_be_asked(config: Config) -> Iterator[Violation]:
    for term in terms_of(config.reward):
        if term.name == "judge":
            yield from _options(term, config.reward.timeout_s)


def _options(term: Term, timeout_s: float | None) -> Iterator[Violation]:
    section = f"{term.section}.kwargs"
    if "api_key" in term.kwargs:
        rule_text = "is a secret, and a configuration is written to files"
        yield Violation(f"{section}.api_key", None, rule_text, f"{section}.api_key_env=NAME_OF_A_VARIABLE")
        return
    try:
        options = JudgeOptions(**term.kwargs)
    except ValidationError as error:
        known = [f"{section}.{one.name}" for one in fields(JudgeOptions)]
        for details in error.errors(include_url=False):
            location = (*section.split("."), *details["loc"])
            yield described({**details, "loc": location}, [section, *known])
        return
    tries = options.max_retries + 1
    if timeout_s is None:
        rule_text = "a judge is asked by a process of its own, with reward.concurrency requests at a time"
        yield Violation("reward.timeout_s", timeout_s, rule_text, f"reward.timeout_s={tries * options.seconds:g}")
    elif timeout_s < tries * options.seconds:
        rule_text = f"ends the judge before its {tries} tries of {section}.seconds = {options.seconds:g} are over"
        fix = f"reward.timeout_s={tries * options.seconds:g}, or fewer seconds or {section}.max_retries"
        yield Violation("reward.timeout_s", timeout_s, rule_text, fix)
