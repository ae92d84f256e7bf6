"""Low-rank adapters (LoRA, Hu et al. 2021) through megatron-bridge: the weights are frozen, and small matrices
parallel to linear layers are trained. The bridge merges them into the weights it exports,
for engines and folders alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemo_rl_lite.config.sections.policy import LoraConfig


def adapters(config: LoraConfig) -> Any:
    """megatron-bridge's own description of the adapters."""
    from megatron.bridge.peft.lora import LoRA

    return LoRA(target_modules=list(config.target_modules), dim=config.dim, alpha=config.alpha, dropout=config.dropout)


def trained_of_all(chunks: list[Any]) -> tuple[int, int]:
    """The number of parameters that have a gradient, and of all parameters."""
    sizes = [(parameter.requires_grad, parameter.numel()) for chunk in chunks for parameter in chunk.parameters()]
    return sum(size for trained, size in sizes if trained), sum(size for _, size in sizes)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".adapter." in name


class WithoutAdapters:
    """The reference policy of a model with adapters: the same weights without the adapters."""

    def __init__(self, chunks: list[Any], adapted: Any):
        """`adapted`: what `adapters` gave, after it was applied to the chunks."""
        self._chunks, self._adapted = chunks, adapted

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model is the reference; afterwards, also after an error, the policy again."""
        with self._adapted.disable_adapter(self._chunks):
            yield
