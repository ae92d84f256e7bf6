"""SFT, DPO, ORPO and KTO, top to bottom: data -> (reference logprobs) -> train. They differ in the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nemo_rl_lite.algorithms.loop import Report, Steps, ValidationTimes, total_steps
from nemo_rl_lite.config.schema_algorithm import SupervisedConfig
from nemo_rl_lite.data.examples import TrainingExamples
from nemo_rl_lite.losses.batch import TokenRow, TokenRows
from nemo_rl_lite.losses.interface import Loss
from nemo_rl_lite.losses.supervised import MeanLogRatio, mismatched
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.policy.interface import BatchRef, Policy, Scored

# Metrics to print, of those that the loss has.
_SHOWN = ("loss", "accuracy", "rewards_margin_mean")


@dataclass
class Supervised:
    """Supervised and preference training."""

    config: SupervisedConfig
    loss: Loss
    with_reference: bool
    """True if the loss compares with the starting weights."""
    policy: Policy
    training: TrainingExamples
    validation: Sequence[TokenRow]
    steps: Steps
    report: Report
    held_out: BatchRef | None = field(default=None, init=False)
    """The validation rows in the workers, after the first validation."""

    def run(self) -> None:
        config, total = self.config, total_steps(self.config, self.training.steps_per_epoch)
        times = ValidationTimes(config.val_period, config.val_at_start, config.val_at_end)
        for step in self.steps.until(total, times, self.validate, self.policy.prepare_for_training):
            if self._has_stopped_improving():
                self.policy.prepare_for_training()
                self.steps.checkpoints.save_if_due(step - 1, last=True)
                break
            self.step(step, total)
        self.steps.checkpoints.finish()

    def step(self, step: int, total: int) -> None:
        """Take one optimizer step on one global batch."""
        timer, scored, loss = Timer(), self._scored, self.loss
        with timer("total_step_time"):
            with timer("data_processing"):
                rows = TokenRows.of(self.training.rows(step - 1))
                batch = self.policy.put_batch(rows)
            if scored:
                with timer("logprob_inference_prep"):
                    self.policy.prepare_for_logprob()
                with timer("policy_and_reference_logprobs"):
                    self.policy.score(batch, scored)
                    loss = self._compared(batch)
            with timer("training_prep"):
                self.policy.prepare_for_training()
            with timer("policy_training"):
                trained = self.policy.train(batch, loss)
            with timer("checkpointing"):
                self.steps.checkpoints.save_if_due(step, step == total)
        # Data without an end has no epochs.
        epochs = step / self.training.steps_per_epoch if self.training.steps_per_epoch else 0.0
        seconds, train = timer.take(), trained | _counts(rows) | {"epoch": epochs}
        shown = _shown(trained) | {"tokens/s": train["total_num_tokens"] / seconds["total_step_time"]}
        self.report.step(step, total, len(rows), train, seconds, self.policy.work(batch, scored), shown)

    def validate(self, step: int) -> dict[str, float]:
        """Measure the loss and its metrics on the held-out rows."""
        if not self.validation:
            return {}
        timer, what = Timer(), f"validating on {len(self.validation)} held-out sequences"
        with timer("total_validation_time"), self.report.console.busy(what):
            self.policy.prepare_for_logprob()
            if self.held_out is None:
                self.held_out = self.policy.put_batch(self.validation, "validation")
                if self._scored:
                    self.policy.score(self.held_out, self._scored)
            measured = self.policy.evaluate(self.held_out, self._compared(self.held_out))
        values = {"val_loss" if name == "loss" else name: value for name, value in measured.items()}
        said = ", ".join(f"{name} {value:.4f}" for name, value in _shown(measured).items())
        self.report.validation(step, values, timer, said)
        return values

    def _compared(self, batch: BatchRef) -> Loss:
        """Return the loss of a batch. KTO's loss gets the current KL of mismatched responses to the reference."""
        with_mismatched_kl = getattr(self.loss, "with_mismatched_kl", None)
        if with_mismatched_kl is None:
            return self.loss
        rows = mismatched(batch.rows, self.training.encoder.max_length)
        others = self.policy.put_batch(rows, f"{batch.name} mismatched")
        self.policy.score(others, self._scored)
        return with_mismatched_kl(self.policy.evaluate(others, MeanLogRatio())["loss"])

    @property
    def _scored(self) -> Sequence[Scored]:
        return ["reference"] if self.with_reference else []

    def _has_stopped_improving(self) -> bool:
        """Return True if the last `early_stop_patience` validations did not improve on the best before them."""
        patience, metric = self.config.early_stop_patience, self.config.val_metric
        steps, values = self.report.metrics.series(f"validation/{metric}")
        if patience is None or len(values) <= patience:
            return False
        better = max if self.config.higher_is_better else min
        best = better(values[:-patience])
        if better(best, *values[-patience:]) != best:
            return False
        self.report.console.say(
            f"stopped after step {steps[-1]}: {patience} validations did not improve on {metric} {best:.4f} "
            "(algorithm.early_stop_patience)"
        )
        return True


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in _SHOWN if name in metrics}


def _counts(rows: TokenRows) -> dict[str, float]:
    sequences, tokens = float(len(rows)), float(rows.mask.sum())
    return {
        "global_valid_seqs": sequences,
        "global_valid_toks": tokens,
        "num_valid_samples": sequences,
        "num_unmasked_tokens": tokens,
        "total_num_tokens": float(rows.lengths.sum()),
    }
