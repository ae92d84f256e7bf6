"""What the loop needs of a generation engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from nemo_rl_lite.config.schema import GenerationConfig
from nemo_rl_lite.refit.engine.connection import Source
from nemo_rl_lite.refit.transport.report import RefitReport

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
    samples_per_prompt: int = 1
    seed: int = 0

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
class Completion:
    """One sampled response: its tokens (the end token included), a logprob each, and why it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """One engine replica in its own process."""

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """`samples_per_prompt` completions for each prompt (token ids), prompt by prompt."""
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

    def receive_weights(self) -> list[RefitReport]:
        """Participate in one refit; returns a report for each rank. Afterwards the engine computes with the new weights
        and has no stale cache."""
        ...


class Generation(Protocol):
    """All replicas, as the loop sees them."""

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]: ...

    def finish_generation(self) -> dict[str, float]:
        """Leave the generation phase until the next refit; metrics of the device's memory."""
        ...
