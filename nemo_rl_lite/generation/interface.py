"""What the loop needs of a generation engine."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from nemo_rl_lite.config.schema import GenerationConfig
from nemo_rl_lite.refit.engine import Source
from nemo_rl_lite.refit.interface import RefitReport

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy. Logprobs are those of the distribution that was sampled from."""

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]

    @classmethod
    def of(cls, config: GenerationConfig, end_tokens: Sequence[int]) -> "Sampling":
        """The configuration's sampling, ending at the tokenizer's end tokens too."""
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
    """One response to sample: what it continues (token ids), how, and a seed of its own, so that neither the other
    requests nor the engine that takes it decide what is sampled. Only rounding depends on them."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    step: int = 0
    """The step that waits for it: of requests that wait for an engine, those of the earliest step begin first."""


@dataclass(frozen=True)
class Completion:
    """One sampled response: its tokens (the end token included), a logprob each, why it ended, and the version of the
    weights that sampled each token, which is the step of the run that made them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[int, ...]
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """The experts that the engine chose for each token of prompt and response in each layer, [tokens - 1, layers, k]:
    no forward pass has seen the last token. None where the engine does not tell."""


@dataclass(frozen=True)
class Drafts:
    """What speculation has done: drafts that the model has verified, their tokens, and those that it accepted."""

    count: int = 0
    tokens: int = 0
    accepted: int = 0

    def __add__(self, other: "Drafts") -> "Drafts":
        return Drafts(self.count + other.count, self.tokens + other.tokens, self.accepted + other.accepted)

    def metrics(self) -> dict[str, float]:
        """The accepted share of all drafts' tokens, and accepted tokens a draft; nothing where nobody speculates."""
        if not self.count:
            return {}
        return {
            "speculation_acceptance": self.accepted / self.tokens,
            "speculation_accepted_length": self.accepted / self.count,
        }


@dataclass(frozen=True)
class Decoded:
    """What engines have done for the requests that they were given."""

    steps: int = 0
    """Forward passes that sampled tokens, each of which reads all weights."""
    cached: int = 0
    """Tokens in the KV caches of the sequences of a step, summed over the steps. A sequence's first token comes from
    the pass over its prompt, which is not counted here."""
    drafts: Drafts = Drafts()

    def __add__(self, other: "Decoded") -> "Decoded":
        return Decoded(self.steps + other.steps, self.cached + other.cached, self.drafts + other.drafts)


class Engine(Protocol):
    """One engine replica in its own process. It works while it is called, and only then: an engine that nobody polls is
    paused, and keeps its requests, also while it gets new weights."""

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Take requests, each under a number that no other unfinished request has."""
        ...

    def poll(self, seconds: float) -> dict[int, Completion]:
        """Work until nothing is left to do, or for about `seconds`; return what has finished since the last call."""
        ...

    def abort(self, numbers: Sequence[int]) -> None:
        """Forget requests; numbers of finished ones are ignored."""
        ...

    def sample_now(self, request: Request) -> Completion:
        """Return the response to a request that is not one of those submitted, which keep their places."""
        ...

    def take_decoded(self) -> Decoded:
        """What `poll` has done since the last call."""
        ...

    def sleep(self) -> None:
        """Give the device's memory to the policy, where the two share it."""
        ...

    def wake_weights(self) -> None:
        """Take memory for weights, which the refit that follows fills."""
        ...

    def wake_cache(self) -> None:
        """Take memory for the KV cache; afterwards the engine can generate."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes of the engine's fullest GPU: `device`, in use by all processes, and of these the engine's own
        `generation_weights` and `kv_cache`. Empty on a CPU."""
        ...

    def join_refit(self, sources: Sequence[Source]) -> None:
        """Connect each of the engine's ranks to its producer."""
        ...

    def receive_weights(self, version: int) -> list[RefitReport]:
        """Participate in one refit; returns a report for each rank. Afterwards the engine computes with the new
        weights, and no request that is submitted from now on uses a stale cache. Unfinished requests continue with the
        new weights; `vllm_cfg.recompute_kv_cache_after_weight_updates` decides what becomes of their caches."""
        ...


class Requests(Protocol):
    """Where episodes get their responses from."""

    async def sample(self, request: Request, near: int | None = None) -> tuple[Completion, int]:
        """Return the response and the engine that sampled it. `near`: the engine that has the beginning of the prompt
        in its cache."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Requests that are added within the block begin together, at its end."""
        ...


class Generation(Protocol):
    """All replicas, as the loop sees them."""

    def serving(self) -> AbstractAsyncContextManager[Requests]:
        """Within the block the engines take requests. What is left of them at its end is aborted."""
        ...

    def finish_generation(self) -> dict[str, float]:
        """Leave the generation phase until the next refit; metrics of the device's memory."""
        ...
