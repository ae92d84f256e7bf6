"""Interfaces of generation: requests, completions, one engine, and all engines together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Literal, Protocol

import numpy as np

from nemo_rl_lite.config.schema import GenerationConfig
from nemo_rl_lite.refit.engine import Source
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.trace import Recipe
from nemo_rl_lite.refit.windows import Piece, WindowRoutes

FinishReason = Literal["stop", "length"]
Versions = tuple[tuple[int, int], ...]
"""Versions of the weights that sampled tokens, run-length encoded: pairs of version and number of tokens. A version is
the training step of the weights."""


def joined_versions(versions: Versions) -> Versions:
    """Return the versions with one pair for neighbours of the same version."""
    runs = groupby(versions, itemgetter(0))
    return tuple((version, sum(count for _, count in run)) for version, run in runs)


class RequestError(Exception):
    """An engine rejects a request; the message is its reason."""


@dataclass(frozen=True)
class ServedOptions:
    """Options of served requests, which training samples without."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_logprobs: int = 0
    """The number of most likely tokens that each position reports."""
    json_schema: str | None = None
    """The schema of the response, as JSON text; None for free text."""

    def changed(self) -> list[str]:
        """Return the names of the options that differ from the defaults, as requests have them."""
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        return ["response_format" if name == "json_schema" else name for name in changed]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request. Temperature 0 is greedy. Logprobs are of the sampled distribution."""

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    min_p: float = 0.0
    options: ServedOptions = ServedOptions()

    @classmethod
    def of(cls, config: GenerationConfig, end_tokens: Sequence[int]) -> "Sampling":
        """Return the configured sampling, with the tokenizer's end tokens as further stop tokens."""
        return cls(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.max_new_tokens,
            stop_token_ids=tuple(sorted({*end_tokens, *config.stop_token_ids})),
            stop_strings=tuple(config.stop_strings),
            min_p=config.min_p,
        )

    def greedy(self) -> "Sampling":
        return replace(self, temperature=0.0, top_p=1.0, top_k=None, min_p=0.0)


@dataclass(frozen=True)
class Request:
    """One response to sample, which continues `prompt` (token ids).

    The seed makes it independent of other requests and of the engine, except for rounding.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    step: int = 0
    """The step that trains on it; 0 for validations and clients. Waiting requests start in the order of steps."""
    cache_version: int | None = None
    """Weights with which the KV cache of the prompt's beginning was computed; None for the engine's weights."""
    streams: bool = False
    """True: each report has the new tokens."""
    continues: bool = False
    """True: a report has the new tokens every few seconds, and another engine continues them if this one is lost."""
    begun: "Unfinished | None" = None
    """Tokens of the response that were sampled before. vLLM continues them with the random numbers that an undisturbed
    engine would draw next; the completion has all tokens."""


@dataclass(eq=False)
class Conversation:
    """The turns of one episode, each of which continues the tokens of the previous one, as the engines see them."""

    ended: bool = False
    """True if no turn follows the present one."""
    engine: int | None = None
    """The engine whose KV cache has the turns so far; None before the first."""
    cache_version: int | None = None
    """The weights with which that cache began."""
    tokens: int = 0
    """Tokens of prompt and response of the last turn."""
    turn_ended_s: float = 0.0
    """Second at which the last turn ended."""
    prompt: int = 0
    """Hash of the first prompt."""
    prompt_tokens: int = 0
    """Tokens of the first prompt."""
    so_far: "Callable[[], Unfinished | None] | None" = None
    """Returns the known tokens of the response in progress; None between two turns."""

    def begin_turn(self, request: Request) -> Request:
        """Return the request of a turn with the version of its cache."""
        if not self.tokens:
            self.prompt, self.prompt_tokens = hash(request.prompt), len(request.prompt)
        return replace(request, cache_version=self.cache_version)

    def add_turn(self, request: Request, completion: "Completion", engine: int) -> None:
        """Note a turn's completion and its engine."""
        self.engine, self.tokens = engine, len(request.prompt) + len(completion.tokens)
        if self.cache_version is None and completion.versions:
            self.cache_version = completion.versions[0][0]


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled response. Each token, the end token included, has a logprob and a version of the weights.

    The constructor converts any sequences, and one version per token to pairs. Two completions are equal if their
    contents are, routed experts aside.
    """

    tokens: np.ndarray
    """int32."""
    logprobs: np.ndarray
    """float32."""
    finish_reason: FinishReason
    versions: Versions
    routed_experts: np.ndarray | None = None
    """Experts chosen for each token of prompt and response, [tokens - 1, layers, k], uint8 or int16. The last token has
    none, as no forward pass has seen it. None if the engine does not report them."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Tokens and logprobs of `ServedOptions.top_logprobs` at each position, the most likely first."""

    def __post_init__(self) -> None:
        each: Any = self.versions
        if each and not isinstance(each[0], tuple):
            each = tuple((version, len(list(run))) for version, run in groupby(each))
        converted = {
            "tokens": np.asarray(self.tokens, np.int32),
            "logprobs": np.asarray(self.logprobs, np.float32),
            "versions": each,
        }
        if self.routed_experts is not None and self.routed_experts.dtype != np.uint8:
            converted["routed_experts"] = self.routed_experts.astype(np.int16)
        for name, value in converted.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return NotImplemented
        same = ("finish_reason", "versions", "top_logprobs")
        return (
            np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.logprobs, other.logprobs)
            and all(getattr(self, name) == getattr(other, name) for name in same)
        )


@dataclass(frozen=True, eq=False)
class Unfinished(Completion):
    """Tokens of an unfinished response: all so far, or those of one report. The finish reason has no meaning."""

    @classmethod
    def joined(cls, parts: "Sequence[Unfinished]") -> "Unfinished":
        """Return the tokens of one or several parts that follow each other."""
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            "length",
            joined_versions(tuple(chain.from_iterable(part.versions for part in parts))),
            None,
            tuple(chain.from_iterable(part.top_logprobs for part in parts)),
        )


Progress = Callable[[Completion], None]
"""Receives the tokens so far."""


@dataclass(frozen=True)
class Drafts:
    """Counts of speculative decoding: verified drafts, their tokens, and the accepted ones."""

    count: int = 0
    tokens: int = 0
    accepted: int = 0
    steps: int = 0
    """Forward passes of engines that speculate."""
    paused: int = 0
    """Steps while drafts were paused."""
    measured: int = 0
    """Comparisons of decoding with and without drafts."""
    gains: float = 0.0
    """Sum of their results: tokens per second with drafts, divided by those without."""

    def __add__(self, other: "Drafts") -> "Drafts":
        return Drafts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def metrics(self) -> dict[str, float]:
        """Return acceptance, accepted tokens per draft, share of steps with paused drafts, and mean gain. The result is
        empty without speculation."""
        found = {}
        if self.count:
            found["speculation_acceptance"] = self.accepted / self.tokens
            found["speculation_accepted_length"] = self.accepted / self.count
        if self.steps:
            found["speculation_paused"] = self.paused / self.steps
        if self.measured:
            found["speculation_gain"] = self.gains / self.measured
        return found


@dataclass(frozen=True)
class CacheUse:
    """Use of engines' KV caches by their requests, summed over forward passes."""

    total: float = 0.0
    """Sum of the used shares, one for each pass."""
    most: float = 0.0
    """Largest used share."""
    preemptions: int = 0
    """Times that a full cache dropped a running request's KV cache, which is computed again."""

    def __add__(self, other: "CacheUse") -> "CacheUse":
        most = max(self.most, other.most)
        return CacheUse(self.total + other.total, most, self.preemptions + other.preemptions)

    def metrics(self, steps: int) -> dict[str, float]:
        """Return the mean share over `steps` passes, the largest share and the preemptions; empty without passes."""
        if not steps or not self.most:
            return {}
        return {
            "kv_cache_usage": self.total / steps,
            "kv_cache_usage_max": self.most,
            "preemptions": float(self.preemptions),
        }


@dataclass(frozen=True)
class Decoded:
    """Decoding work of engines."""

    steps: int = 0
    """Forward passes that sampled tokens. Each reads all weights."""
    cached: int = 0
    """Tokens in the KV caches of a forward pass, summed over the passes. Prefills are not counted."""
    drafts: Drafts = Drafts()
    cache: CacheUse = CacheUse()
    seconds: float = 0.0
    """Time in steps."""

    def __add__(self, other: "Decoded") -> "Decoded":
        drafts, cache = self.drafts + other.drafts, self.cache + other.cache
        steps, cached, seconds = self.steps + other.steps, self.cached + other.cached, self.seconds + other.seconds
        return Decoded(steps, cached, drafts, cache, seconds)


@dataclass(frozen=True)
class EngineLoad:
    """An engine's requests and KV cache after a step. Shares of the cache are 0 if the engine does not know them."""

    unfinished_tokens: int = 0
    """Tokens that unfinished responses have so far."""
    running: int = 0
    """Requests with a KV cache."""
    waiting: int = 0
    """Requests without one: new and preempted."""
    held_tokens: int = 0
    """Tokens of the running requests: prompts and responses so far."""
    cache_usage: float = 0.0
    """Share of the cache's blocks that running requests use."""
    preempted: int = 0
    """Preemptions since the last `load`."""


@dataclass(frozen=True)
class EngineReport:
    """News of an engine that works by itself."""

    finished: Mapping[int, Completion | RequestError]
    """Completions and rejections since the last report, by the request's number. For unfinished requests that stream or
    continue, new tokens."""
    load: EngineLoad
    steps: int
    """Steps since the engine's start."""
    stuck_s: float
    """Seconds since the step in progress began; 0 between two steps."""
    longest_s: float = 0.0
    """Longest step time since the last report, in seconds; 0 without a step."""


class Engine(Protocol):
    """One engine replica in its own process. `EngineLoop` steps it. Between two steps it keeps its requests, even
    during a refit."""

    version: int
    """Training step of the weights."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and its response."""
        ...

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Add requests, by unique number."""
        ...

    def step(self) -> dict[int, Completion | RequestError]:
        """Advance the requests by one forward pass, or a batch of them to its end. Return the completions and
        rejections since the last call."""
        ...

    def new_tokens(self, of_all: bool) -> dict[int, Unfinished]:
        """Return the tokens since the last call of each request that streams and, with `of_all`, that continues."""
        ...

    def load(self) -> EngineLoad:
        """Return the requests and the use of the KV cache."""
        ...

    def abort(self, numbers: Sequence[int]) -> None:
        """Abort requests. Numbers of finished requests are ignored."""
        ...

    def sample_now(self, request: Request) -> Completion:
        """Return the response to a request at once; submitted requests keep their places."""
        ...

    def take_decoded(self) -> Decoded:
        """Return the work of `step` since the last call."""
        ...

    def sleep(self) -> None:
        """Free the device's memory for the policy, if they share it. Unfinished requests keep their tokens, and
        continue after the next refit."""
        ...

    def wake_weights(self) -> None:
        """Allocate memory for weights, which the next refit fills."""
        ...

    def wake_cache(self) -> None:
        """Allocate the KV cache; afterwards the engine can generate."""
        ...

    def memory(self) -> dict[str, int]:
        """Return bytes on the engine's GPU with the highest use: `device` (all processes), `generation_weights` and
        `kv_cache`. Empty on CPUs."""
        ...

    def join_refit(self, sources: Sequence[Source]) -> None:
        """Connect each of the engine's ranks to its producer."""
        ...

    def needed_pieces(self, recipe: Recipe) -> list[Sequence[Piece] | None]:
        """Return, after a first refit, the windows of parameters that each rank copies; None if a rank's loader does
        more than copy. `recipe`: the windows that fill each tensor."""
        ...

    def join_windows(self, routes: Sequence[WindowRoutes]) -> list[str | None]:
        """Connect each rank to the senders of its windows, for later refits. Return each rank's first tensor that
        differs from the windows of the same weights, or None."""
        ...

    def receive_weights(self, version: int) -> list[RefitReport]:
        """Take part in a refit; return a report for each rank. Unfinished requests and later turns of a conversation
        continue with the new weights; `vllm_cfg.recompute_kv_cache_after_weight_updates` decides about their caches.
        Other requests use no stale cache."""
        ...


class Requests(Protocol):
    """Samples the responses of episodes."""

    @property
    def are_in_work(self) -> bool:
        """True while an engine has a call in flight, which has its own time limit."""
        ...

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of unfinished responses."""
        ...

    async def sample(
        self, request: Request, conversation: Conversation | None = None, progress: Progress | None = None
    ) -> tuple[Completion, int]:
        """Return the response and the engine that sampled it. `conversation`: what the request continues, if it is not
        alone; `progress`: for a streaming request."""
        ...

    def submit_as_batch(self) -> AbstractContextManager[None]:
        """Start the requests of the block together at its end."""
        ...


class Generation(Protocol):
    """All engines, as the loop uses them."""

    def serving(self) -> AbstractAsyncContextManager[Requests]:
        """Accept requests during the block, and abort unfinished ones at its end."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """End the generation phase until the next refit; return metrics of the device's memory."""
        ...
