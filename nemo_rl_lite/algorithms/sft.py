"""Supervised fine-tuning, top to bottom: data -> train."""

from dataclasses import dataclass

from nemo_rl_lite.algorithms.losses import Batch, Normalizers
from nemo_rl_lite.algorithms.sft_loss import SFTLoss
from nemo_rl_lite.config.schema import SFTConfig
from nemo_rl_lite.data.examples import TrainingExamples
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.sinks import MetricsLog, under
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.offload.mover import move_metrics
from nemo_rl_lite.policy.interface import Policy


@dataclass
class SFT:
    """Everything one run is made of. `run()` is the algorithm."""

    config: SFTConfig
    policy: Policy
    training: TrainingExamples
    validation: Batch | None
    metrics: MetricsLog
    console: RunConsole
    devices: int
    """GPUs of the run, or its policy ranks on CPUs: what throughput is divided by."""

    def run(self) -> None:
        steps = self.steps()
        if self.config.val_at_start:
            self.validate(0)
        for step in range(1, steps + 1):
            self.step(step, steps)
            last = step == steps
            if (self.config.val_at_end and last) or (self.config.val_period and step % self.config.val_period == 0):
                self.validate(step)

    def steps(self) -> int:
        """Optimizer steps of the run: as many as its epochs have, or `max_num_steps` where that is fewer."""
        epochs, steps_per_epoch = self.config.max_num_epochs, self.training.steps_per_epoch
        limits = [self.config.max_num_steps, epochs and steps_per_epoch and epochs * steps_per_epoch]
        return min(limit for limit in limits if limit is not None)

    def step(self, step: int, steps: int) -> None:
        """One optimizer step on one global batch."""
        timer = Timer()
        with timer("total_step_time"):
            with timer("data_processing"):
                batch = self.training.batch(step - 1)
            with timer("training_prep"):
                self.policy.prepare_for_training()
            with timer("policy_training"):
                trained = self.policy.train(batch, SFTLoss())
        seconds = timer.take()
        self.metrics.log(
            step,
            under("train", trained | _counts(batch) | {"epoch": self._epoch(step)})
            | under("timing/train", seconds)
            | under("performance", self._throughput(batch, seconds))
            | under("offload", move_metrics(self.policy.take_moves()))
            | under("memory", self.policy.take_memory()),
        )
        tokens_per_sec = batch["lengths"].sum().item() / seconds["total_step_time"]
        self.console.step(step, steps, {"loss": trained["loss"], "tokens/s": tokens_per_sec}, seconds)

    def validate(self, step: int) -> None:
        """Loss on the held-out chats, in nats a response token."""
        if self.validation is None:
            return
        batch, timer = self.validation, Timer()
        with timer("total_validation_time"), self.console.busy(f"validating on {len(batch['tokens'])} held-out chats"):
            self.policy.prepare_for_logprob()
            logprobs_BT = self.policy.logprobs(batch["tokens"], batch["lengths"])
            loss, _ = SFTLoss()(logprobs_BT, batch, Normalizers.of(batch["mask"]))
        measured = {"val_loss": loss.item()}
        self.metrics.log(step, under("validation", measured) | under("timing/validation", timer.take()))
        self.console.say(f"validation after step {step}: loss {loss.item():.4f}")

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
