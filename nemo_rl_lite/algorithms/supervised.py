"""Training on a data set, top to bottom: data -> (reference logprobs) -> train. What SFT and DPO share is all but the
loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nemo_rl_lite.algorithms.steps import Steps, ValidationTimes
from nemo_rl_lite.config.schema import SupervisedConfig
from nemo_rl_lite.data.examples import TrainingExamples
from nemo_rl_lite.losses.policy_gradient import Batch, Loss
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog, under
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.offload.mover import move_metrics
from nemo_rl_lite.policy.interface import Policy


@dataclass
class Supervised:
    """Everything one run is made of. `run()` is the algorithm."""

    config: SupervisedConfig
    loss: Loss
    with_reference: bool
    """Whether the loss compares with the policy that the run started from."""
    shown: tuple[str, ...]
    """Metrics of the loss that are worth a place on the terminal."""
    policy: Policy
    training: TrainingExamples
    validation: Batch | None
    metrics: MetricsLog
    console: RunConsole
    steps: Steps
    devices: int
    """GPUs of the run, or its policy ranks on CPUs: what throughput is divided by."""
    system: Callable[[], dict[str, float]]
    """Metrics of the machines since it was last asked."""

    def run(self) -> None:
        config, total = self.config, self.total()
        times = ValidationTimes(config.val_period, config.val_at_start, config.val_at_end)
        for step in self.steps.until(total, times, self.validate, self.policy.prepare_for_training):
            if self._has_stopped_improving():
                self.policy.prepare_for_training()
                self.steps.checkpoints.save(step - 1)
                break
            self.step(step, total)
        self.steps.checkpoints.finish()

    def total(self) -> int:
        """Optimizer steps of the run: as many as its epochs have, or `max_num_steps` where that is fewer."""
        epochs, steps_per_epoch = self.config.max_num_epochs, self.training.steps_per_epoch
        limits = [self.config.max_num_steps, epochs and steps_per_epoch and epochs * steps_per_epoch]
        return min(limit for limit in limits if limit is not None)

    def step(self, step: int, total: int) -> None:
        """One optimizer step on one global batch."""
        timer = Timer()
        with timer("total_step_time"):
            with timer("data_processing"):
                batch = self.training.batch(step - 1)
            if self.with_reference:
                with timer("logprob_inference_prep"):
                    self.policy.prepare_for_logprob()
                with timer("policy_and_reference_logprobs"):
                    batch = self._compared(batch)
            with timer("training_prep"):
                self.policy.prepare_for_training()
            with timer("policy_training"):
                trained = self.policy.train(batch, self.loss)
            with timer("checkpointing"):
                self.steps.checkpoints.save_if_due(step, step == total)
        seconds = timer.take()
        self.metrics.log(
            step,
            under("train", trained | _counts(batch) | {"epoch": self._epoch(step)})
            | under("timing/train", seconds)
            | under("performance", self._throughput(batch, seconds))
            | under("offload", move_metrics(self.policy.take_moves()))
            | under("memory", self.policy.take_memory())
            | under("ray", self.system()),
        )
        tokens_per_sec = batch["lengths"].sum().item() / seconds["total_step_time"]
        shown = {name: trained[name] for name in ("loss", *self.shown)}
        trend = self.metrics.series("train/loss")[1]
        self.console.step(step, total, shown | {"tokens/s": tokens_per_sec}, seconds, trend)

    def validate(self, step: int) -> dict[str, float]:
        """The loss and its metrics on what is held out; nothing where nothing is."""
        if self.validation is None:
            return {}
        batch, timer = self.validation, Timer()
        with (
            timer("total_validation_time"),
            self.console.busy(f"validating on {len(batch['tokens'])} held-out sequences"),
        ):
            self.policy.prepare_for_logprob()
            if self.with_reference and "reference_logprobs" not in batch:
                # They stay the same.
                batch = self.validation = self._compared(batch)
            logprobs_BT = self.policy.logprobs(batch["tokens"], batch["lengths"])
            _, measured = self.loss(logprobs_BT, batch, self.loss.counts(batch))
        values = {"val_loss" if name == "loss" else name: value.item() for name, value in measured.items()}
        self.metrics.log(step, under("validation", values) | under("timing/validation", timer.take()))
        more = "".join(f", {name} {values[name]:.4f}" for name in self.shown)
        self.console.say(f"validation after step {step}: loss {values['val_loss']:.4f}{more}")
        return values

    def _compared(self, batch: Batch) -> Batch:
        """The batch with each response's logprob under the reference policy."""
        logprobs_BT = self.policy.reference_logprobs(batch["tokens"], batch["lengths"])
        return batch | {"reference_logprobs": torch.where(batch["mask"] > 0, logprobs_BT, 0.0).sum(dim=1)}

    def _has_stopped_improving(self) -> bool:
        """Whether so many validations in a row were no better than the best before them."""
        patience, metric = self.config.early_stop_patience, self.config.val_metric
        steps, values = self.metrics.series(f"validation/{metric}")
        if patience is None or len(values) <= patience:
            return False
        better = max if self.config.higher_is_better else min
        best = better(values[:-patience])
        if better(best, *values[-patience:]) != best:
            return False
        self.console.say(
            f"stopped after step {steps[-1]}: {patience} validations in a row were no better than {metric} {best:.4f} "
            "(algorithm.early_stop_patience)"
        )
        return True

    def _epoch(self, step: int) -> float:
        """Passes over the data that are done after `step`; 0 where the data has no end."""
        return step / self.training.steps_per_epoch if self.training.steps_per_epoch else 0.0

    def _throughput(self, batch: Batch, seconds: dict[str, float]) -> dict[str, float]:
        samples, tokens = len(batch["tokens"]), batch["lengths"].sum().item()
        total = seconds["total_step_time"]
        return {
            "samples_per_sec": samples / total,
            "tokens_per_sec": tokens / total,
            "policy_training_tokens_per_sec": tokens / seconds["policy_training"],
            "tokens_per_sec_per_gpu": tokens / total / self.devices,
        }


def _counts(batch: Batch) -> dict[str, float]:
    sequences, tokens = float(len(batch["tokens"])), batch["mask"].sum().item()
    return {
        "global_valid_seqs": sequences,
        "global_valid_toks": tokens,
        "num_valid_samples": sequences,
        "num_unmasked_tokens": tokens,
        "total_num_tokens": float(batch["lengths"].sum().item()),
    }
