"""Detect weak learning signals, few prompts with mixed rewards or many truncated responses, and suggest fixes."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from nemo_rl_lite.config.algorithms import ALGORITHMS

FEWEST_MIXED, MOST_TRUNCATED = 0.1, 0.5
# Number of last steps that the summary also checks.
RECENT = 10
# Minimum number of prompts for a sentence, over consecutive steps.
_FEWEST_PROMPTS = 10
_MIXED, _TRUNCATED = "baseline_reward/pct_mixed", "truncation_rate"
_ZERO, _ONE = "baseline_reward/pct_0", "baseline_reward/pct_1"
_LABELS = {_MIXED: "mixed prompts", _TRUNCATED: "truncated"}
Shares = Mapping[str, float | None]
"""Metrics of a step, or means over steps, without the prefix `train/`."""


class WeakSignals:
    """Finds weak signals in the steps of a run. `config` maps dotted keys to values."""

    def __init__(self, config: Mapping[str, Any]):
        self._config = config
        row = ALGORITHMS.get(str(config.get("algorithm.name")))
        # With a teacher, rewards and truncation matter little.
        self._learns_from_reward = row is not None and not row.has_teacher
        # The batch baseline gives prompts with equal rewards an advantage.
        self._within_prompts = config.get("algorithm.use_leave_one_out_baseline") != "batch"
        steps = math.ceil(_FEWEST_PROMPTS / (config.get("algorithm.num_prompts_per_step") or _FEWEST_PROMPTS))
        self._recent = deque[Shares](maxlen=steps)
        self._told = set[str]()

    def shown(self, step: Shares) -> dict[str, float]:
        """Return the weak values of a step by label."""
        return {_LABELS[name]: step[name] or 0.0 for name in self._weak(step)}

    def news(self, step: Shares) -> Iterator[str]:
        """Yield a sentence about each new weak signal."""
        self._recent.append(step)
        means = _means(self._recent)
        for name in self._weak(means) if len(self._recent) == self._recent.maxlen else ():
            if name not in self._told:
                self._told.add(name)
                yield self._sentence(name, means, "")

    def at_end(self, history: Sequence[Shares]) -> list[str]:
        """Return sentences about the run or its last steps. `history`: metrics by full name."""
        steps = [
            {name.removeprefix("train/"): value for name, value in entry.items()}
            for entry in history
            if f"train/{_MIXED}" in entry
        ]
        found = dict[str, str]()
        for part in (steps, steps[-RECENT:]):
            means = _means(part)
            for name in self._weak(means):
                where = f" in the last {len(part)} steps" if len(part) < len(steps) else f" in {len(part)} steps"
                found[name] = self._sentence(name, means, where if len(steps) > 1 else "")
        return [*found.values()]

    def _weak(self, shares: Shares) -> Iterator[str]:
        if not self._learns_from_reward:
            return
        mixed, truncated = shares.get(_MIXED), shares.get(_TRUNCATED)
        if self._within_prompts and mixed is not None and mixed < FEWEST_MIXED:
            yield _MIXED
        if truncated is not None and truncated > MOST_TRUNCATED:
            yield _TRUNCATED

    def _sentence(self, name: str, means: Shares, where: str) -> str:
        share = means[name] or 0.0
        if name == _TRUNCATED:
            return f"{share:.0%} of the responses{where} are truncated: try {', '.join(self._against_truncation())}"
        zero, one = means.get(_ZERO) or 0.0, means.get(_ONE) or 0.0
        alike = "all 0" if zero >= 0.5 else "all 1" if one >= 0.5 else "all the same"
        return (
            f"{share:.0%} of the prompts{where} have mixed rewards; the others (mostly {alike}) have no advantage: "
            f"try {', '.join(self._against_equal_rewards(share, zero, one))}"
        )

    def _against_equal_rewards(self, share: float, zero: float, one: float) -> Iterator[str]:
        temperature = f"a higher generation.temperature (now {self._config.get('generation.temperature')})"
        samples = self._config.get("algorithm.num_generations_per_prompt")
        if one >= 0.5:
            yield "harder data"
        elif zero >= 0.5:
            yield from ("easier or mixed data", "a part of the reward for the right format (reward.terms)")
        else:
            yield "a reward with more than one value"
        yield temperature
        yield f"more algorithm.num_generations_per_prompt (now {samples})"
        # Without any mixed prompt, dynamic sampling finds none.
        if share and not self._config.get("algorithm.use_dynamic_sampling"):
            yield "algorithm.use_dynamic_sampling=true"

    def _against_truncation(self) -> Iterator[str]:
        yield f"a larger generation.max_new_tokens (now {self._config.get('generation.max_new_tokens')})"
        if self._config.get("environment.name") or self._config.get("agent.name"):
            yield f"policy.max_total_sequence_length (now {self._config.get('policy.max_total_sequence_length')})"
        if not self._config.get("generation.stop_strings"):
            yield "generation.stop_strings"
        yield "a prompt that asks for short answers"
        if self._config.get("algorithm.reward_shaping.overlong_buffer_length") is None:
            yield "algorithm.reward_shaping.overlong_buffer_length"


def _means(steps: Sequence[Shares] | deque[Shares]) -> Shares:
    """Return the means of the shares over steps, without those that no step has."""
    known = {name: [step.get(name) for step in steps] for name in (_MIXED, _ZERO, _ONE, _TRUNCATED)}
    finite = {
        name: [value for value in values if value is not None and math.isfinite(value)]
        for name, values in known.items()
    }
    return {name: fmean(values) for name, values in finite.items() if values}
