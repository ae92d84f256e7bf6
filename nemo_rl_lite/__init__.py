"""Post-train language models with GRPO, SFT, DPO, ORPO, KTO and distillation, on Ray, Megatron and vLLM.

The classes of the Python API are imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl_lite.run.trainer import DPO, GRPO, KTO, ORPO, SFT, Distillation, Trainer, TrainingResult

__version__ = "0.1.0"
__all__ = ["DPO", "GRPO", "KTO", "ORPO", "SFT", "Distillation", "Trainer", "TrainingResult"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_rl_lite.run import trainer

    return getattr(trainer, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
