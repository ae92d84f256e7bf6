"""The table of algorithms, so that other packages need no algorithm's name.

A new algorithm needs: options (`schema_algorithm.py`, and the union in `schema.py`), a loop (`algorithms/`), a job
(`run/jobs.py`), a file in `configs/algorithm/`, and a row here. Rows name code of higher packages by dotted paths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import (
    AlgorithmConfig,
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    RolloutAlgorithmConfig,
    SFTConfig,
)


@dataclass(frozen=True)
class Algorithm:
    """One algorithm. `data`, `job`, `loss` and `view` are dotted paths, see `user_code.imported`."""

    options: type[AlgorithmConfig]
    data: str
    """Row format: a `data.formats.RowFormat`."""
    job: str
    """Data, workers and loop: a class with the constructor and the method of `run.run.Job`."""
    loss: str
    """Factory of the loss from the options; `algorithm.loss` can replace it."""
    view: str
    """Main curves of a run: an `observability.summary.View`."""
    sequences_together: int = 1
    """Number of neighbouring sequences that the loss compares; they must be in one micro-batch."""
    compares: Callable[[Any], bool] = lambda options: False
    """True if the loss, with these options, compares the policy with the reference policy."""
    has_teacher: bool = False
    """A teacher computes logprobs of the rows."""
    learning_rate: float | None = None
    """Default for full fine-tuning; None: the default in configs/."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        options=GRPOConfig,
        data="nemo_rl_lite.data.formats.PROBLEMS",
        job="nemo_rl_lite.run.jobs.GRPOJob",
        loss="nemo_rl_lite.losses.grpo.grpo_loss",
        view="nemo_rl_lite.observability.summary.REWARD",
        compares=lambda options: options.loss_fn.reference_policy_kl_penalty > 0,
    ),
    "sft": Algorithm(
        options=SFTConfig,
        data="nemo_rl_lite.data.formats.CHATS",
        job="nemo_rl_lite.run.jobs.SupervisedJob",
        loss="nemo_rl_lite.losses.supervised.sft_loss",
        view="nemo_rl_lite.observability.summary.LOSS",
        learning_rate=5e-6,
    ),
    "dpo": Algorithm(
        options=DPOConfig,
        data="nemo_rl_lite.data.formats.PAIRS",
        job="nemo_rl_lite.run.jobs.SupervisedJob",
        loss="nemo_rl_lite.losses.supervised.DPOLoss",
        view="nemo_rl_lite.observability.summary.PREFERENCE",
        sequences_together=2,
        compares=lambda options: True,
    ),
    "orpo": Algorithm(
        options=ORPOConfig,
        data="nemo_rl_lite.data.formats.PAIRS",
        job="nemo_rl_lite.run.jobs.SupervisedJob",
        loss="nemo_rl_lite.losses.supervised.ORPOLoss",
        view="nemo_rl_lite.observability.summary.PREFERENCE",
        sequences_together=2,
    ),
    "kto": Algorithm(
        options=KTOConfig,
        data="nemo_rl_lite.data.formats.UNPAIRED",
        job="nemo_rl_lite.run.jobs.SupervisedJob",
        loss="nemo_rl_lite.losses.supervised.kto_loss",
        view="nemo_rl_lite.observability.summary.UNPAIRED",
        compares=lambda options: True,
    ),
    "distillation": Algorithm(
        options=DistillationConfig,
        data="nemo_rl_lite.data.formats.PROBLEMS",
        job="nemo_rl_lite.run.jobs.GRPOJob",
        loss="nemo_rl_lite.losses.distillation.distillation_loss",
        view="nemo_rl_lite.observability.summary.TEACHER",
        compares=lambda options: options.topk_logits_k is None and options.loss_fn.reference_policy_kl_penalty > 0,
        has_teacher=True,
    ),
}


def algorithm_of(config: Config) -> Algorithm:
    """Return the row of the configuration's algorithm."""
    return ALGORITHMS[config.algorithm.name]


def generates(config: Config) -> bool:
    """Return whether engines sample the responses that the run trains on."""
    return isinstance(config.algorithm, RolloutAlgorithmConfig) and replayed_run(config) is None


def replayed_run(config: Config) -> str | None:
    """Return the folder of the run whose rollouts this run trains on again; None for other runs."""
    return config.algorithm.rollouts.replay if isinstance(config.algorithm, GRPOConfig) else None


def compares(config: Config) -> bool:
    """Return whether this run's loss compares the policy with the reference policy."""
    return algorithm_of(config).compares(config.algorithm)


def moves_reference(config: Config) -> bool:
    """Return whether the reference policy follows the trained one."""
    return (
        isinstance(config.algorithm, GRPOConfig)
        and config.algorithm.ref_model_sync_steps is not None
        and compares(config)
    )


def has_teacher(config: Config) -> bool:
    """Return whether a teacher computes logprobs of the rows."""
    return algorithm_of(config).has_teacher
