"""Interface of generation engines: requests and completions, one engine, and all engines together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol

import numpy as np

from nemo_rl_lite.config.schema import GenerationConfig
from nemo_rl_lite.refit.engine import Source
from nemo_rl_lite.refit.interface import RefitReport

FinishReason = Literal["stop", "length"]


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
        """Return the names of the options that differ from the defaults."""
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request. `temperature` 0 is greedy. Logprobs are those of the sampled distribution."""

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    options: ServedOptions = ServedOptions()

    @classmethod
    def of(cls, config: GenerationConfig, end_tokens: Sequence[int]) -> "Sampling":
        """Return the configuration's sampling, which ends at the tokenizer's end tokens too."""
        return cls(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.max_new_tokens,
            stop_token_ids=tuple(sorted({*end_tokens, *config.stop_token_ids})),
            stop_strings=tuple(config.stop_strings),
        )

    def greedy(self) -> "Sampling":
        return replace(self, temperature=0.0, top_p=1.0, top_k=None)


@dataclass(frozen=True)
class Request:
    """One response to sample, which continues `prompt` (token ids).

    With its own seed it does not depend on other requests or on the choice of an engine, except for rounding.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    step: int = 0
    """The step that waits for it. Waiting requests begin in the order of their steps."""
    streams: bool = False
    """`Engine.poll` also returns what there is of the response so far."""


@dataclass(frozen=True)
class Completion:
    """One sampled response: its tokens (end token included), with a logprob and a version of the weights each.

    A version is the step that made the weights.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[int, ...]
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """The experts chosen for each token of prompt and response in each layer, [tokens - 1, layers, k]: no forward pass
    has seen the last token. None if the engine does not report them."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Tokens and logprobs of `ServedOptions.top_logprobs` at each position, the most likely first."""


@dataclass(frozen=True)
class Unfinished(Completion):
    """All tokens so far of a response that streams. Its finish reason means nothing."""


Progress = Callable[[Completion], None]
"""Told of the tokens so far."""


@dataclass(frozen=True)
class Drafts:
    """Counts of speculative decoding: verified drafts, their tokens, and the accepted ones."""

    count: int = 0
    tokens: int = 0
    accepted: int = 0

    def __add__(self, other: "Drafts") -> "Drafts":
        return Drafts(self.count + other.count, self.tokens + other.tokens, self.accepted + other.accepted)

    def metrics(self) -> dict[str, float]:
        """Return the accepted share of draft tokens, and accepted tokens per draft; nothing without drafts."""
        if not self.count:
            return {}
        return {
            "speculation_acceptance": self.accepted / self.tokens,
            "speculation_accepted_length": self.accepted / self.count,
        }


@dataclass(frozen=True)
class Decoded:
    """Work that engines have done for their requests."""

    steps: int = 0
    """Forward passes that sampled tokens, each of which reads all weights."""
    cached: int = 0
    """Tokens in the KV caches of a step's sequences, summed over the steps. Prefills, which sample the first tokens,
    are not counted here."""
    drafts: Drafts = Drafts()

    def __add__(self, other: "Decoded") -> "Decoded":
        return Decoded(self.steps + other.steps, self.cached + other.cached, self.drafts + other.drafts)


class Engine(Protocol):
    """One engine replica in its own process. It works only while it is called: an engine that no one polls is
    paused, and keeps its requests, even while it gets new weights."""

    version: int
    """The step that made the weights."""

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and response together."""
        ...

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Take requests, each under a number that no other unfinished request has."""
        ...

    def poll(self, seconds: float) -> dict[int, Completion | RequestError]:
        """Work until nothing is left to do, or for about `seconds`. Return what has finished or was rejected since the
        last call, and an `Unfinished` completion for each request that streams."""
        ...

    def unfinished_tokens(self) -> int:
        """Return the number of tokens that unfinished requests have so far, as far as the engine knows it."""
        ...

    def abort(self, numbers: Sequence[int]) -> None:
        """Forget requests; numbers of finished ones are ignored."""
        ...

    def sample_now(self, request: Request) -> Completion:
        """Return the response to a request outside of those submitted, which keep their places."""
        ...

    def take_decoded(self) -> Decoded:
        """Return what `poll` has done since the last call."""
        ...

    def sleep(self) -> None:
        """Free the device's memory for the policy, where the two share it."""
        ...

    def wake_weights(self) -> None:
        """Allocate memory for weights, which the refit that follows fills."""
        ...

    def wake_cache(self) -> None:
        """Allocate the KV cache; afterwards the engine can generate."""
        ...

    def memory(self) -> dict[str, int]:
        """Return bytes of the engine's fullest GPU: `device`, in use by all processes, and the engine's own
        `generation_weights` and `kv_cache`. Empty on a CPU."""
        ...

    def join_refit(self, sources: Sequence[Source]) -> None:
        """Connect each of the engine's ranks to its producer."""
        ...

    def receive_weights(self, version: int) -> list[RefitReport]:
        """Participate in one refit; return a report for each rank. Afterwards the engine computes with the new
        weights, and no later request uses a stale cache. Unfinished requests continue with the new weights;
        `vllm_cfg.recompute_kv_cache_after_weight_updates` decides about their caches."""
        ...


class Requests(Protocol):
    """Gets episodes their responses."""

    @property
    def are_in_work(self) -> bool:
        """True while an engine has a call that it must answer within a limit of its own."""
        ...

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of unfinished responses."""
        ...

    async def sample(
        self, request: Request, near: int | None = None, progress: Progress | None = None
    ) -> tuple[Completion, int]:
        """Return the response and the engine that sampled it. `near`: the engine that has the prompt's prefix cached;
        `progress` is for a request that streams."""
        ...

    def submit_as_batch(self) -> AbstractContextManager[None]:
        """Start the requests of the block together, at its end."""
        ...


class Generation(Protocol):
    """Interface of all replicas for the loop."""

    def serving(self) -> AbstractAsyncContextManager[Requests]:
        """Let the engines take requests in the block, and abort unfinished ones at its end."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """Leave the generation phase until the next refit; return metrics of the device's memory."""
        ...
