"""Admission of requests to an engine, and expected lengths of responses. Both are functions of numbers."""

from collections.abc import Sequence

from nemo_rl_lite.generation.interface import EngineLoad

# Share of the cache that requests may be expected to need; with conversations between turns less, because the cache
# also has the sequences that ended since their last turns.
_FULL = 0.95
_FULL_BETWEEN = 0.85
# Completed conversations that the mean length remembers.
_REMEMBERED = 256
# Prompts whose response lengths are remembered, and completions that the mean of one remembers.
_PROMPTS, _SAMPLES = 100_000, 16


class Admission:
    """Decides how many requests of one engine may be in flight, so that its KV cache does not overflow.

    A preempted request, or a conversation whose prefix was evicted, is computed again. A request needs its present
    length, and on average over its time half of a finished conversation's. As long as all `most` requests are expected
    to fit, it allows all.
    """

    def __init__(self, most: int):
        """`most`: maximum number of requests in flight."""
        self.most = most
        self._mean, self._ended = 0.0, 0
        # Share of the cache for one token, as last measured.
        self._token = 0.0

    def end(self, tokens: int) -> None:
        """Note a finished conversation of `tokens` tokens, with its prompt."""
        self._ended += 1
        self._mean += (tokens - self._mean) / min(self._ended, _REMEMBERED)

    def capacity(self, load: EngineLoad, between_turns: Sequence[int] = ()) -> int:
        """Return how many conversations the engine may have, from 1 to `most`. `between_turns`: tokens of those whose
        next turn has not begun, for which the cache keeps the prefix."""
        if load.held_tokens:
            self._token = load.cache_usage / load.held_tokens
        count = load.running + len(between_turns)
        usage = load.cache_usage + sum(between_turns) * self._token
        expected = self._token * self._mean / 2
        needs = max(usage, count * expected)
        if not needs and not expected:
            return self.most
        room = (_FULL_BETWEEN if between_turns else _FULL) - needs
        if load.preempted or (load.waiting and load.cache_usage >= _FULL):
            room = min(room, 0.0)
        each = needs / count if room < 0 or not expected else expected
        return max(1, min(self.most, int(count + room / each)))


class ResponseLengths:
    """Expected lengths of responses, from earlier responses to the same prompt: of the step or of earlier epochs."""

    def __init__(self) -> None:
        # By hash of the prompt: the mean length and the number of responses.
        self._means: dict[int, tuple[float, int]] = {}
        self._mean, self._count = 0.0, 0

    def note(self, prompt: int, tokens: int) -> None:
        """Note a response of `tokens` tokens to the prompt with this hash."""
        mean, count = self._means.pop(prompt, (0.0, 0))
        count = min(count + 1, _SAMPLES)
        self._means[prompt] = mean + (tokens - mean) / count, count
        self._count = min(self._count + 1, _REMEMBERED)
        self._mean += (tokens - self._mean) / self._count
        if len(self._means) > _PROMPTS:
            del self._means[next(iter(self._means))]

    def expected(self, prompt: int) -> float:
        """Return the expected length of a response; the mean of all prompts for an unknown one."""
        return self._means.get(prompt, (self._mean, 0))[0]
