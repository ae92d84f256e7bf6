"""Group relative policy optimisation, top to bottom: generate -> logprob -> train -> refit."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nemo_rl_lite.algorithms.steps import Steps, ValidationTimes
from nemo_rl_lite.config.schema import GRPOConfig
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.generation.interface import Generation, Sampling
from nemo_rl_lite.losses.advantages import baseline_metrics, group_advantages
from nemo_rl_lite.losses.policy_gradient import Batch, GRPOLoss, mismatch_metrics
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.memory import with_rest
from nemo_rl_lite.observability.metrics_log import MetricsLog, under
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.offload.mover import move_metrics
from nemo_rl_lite.policy.interface import Policy
from nemo_rl_lite.rollout.files import Split
from nemo_rl_lite.rollout.rollout import Rollout, RolloutCollector

log = logging.getLogger(__name__)

# New weights for the engines, and the check that they compute the same with them; both return metrics.
Refit = Callable[[], dict[str, float]]


@dataclass
class GRPO:
    """Everything one run is made of. `run()` is the algorithm."""

    config: GRPOConfig
    policy: Policy
    generation: Generation
    refit: Refit
    check_refit: Refit
    collector: RolloutCollector
    sampling: Sampling
    training: TrainingSet
    validation: Sequence[Problem]
    metrics: MetricsLog
    console: RunConsole
    steps: Steps
    mismatch_warning: float
    devices: int
    """GPUs of the run, or its policy ranks on CPUs: what throughput is divided by."""
    on_rollout: Callable[[int, Split, Rollout], None]
    system: Callable[[], dict[str, float]]
    """Metrics of the machines since it was last asked."""

    def run(self) -> None:
        if self.sampling.top_p < 1 or self.sampling.top_k is not None:
            log.warning(
                "generation.top_p or top_k cuts the distribution that is sampled from, but not the one the policy's "
                "logprobs come from: importance ratios are off by the share that is cut"
            )
        config, total = self.config, self.config.max_num_steps
        self.metrics.log(self.steps.done, under("refit", self.refit()))
        times = ValidationTimes(config.val_period, config.val_at_start, config.val_at_end)
        for step in self.steps.until(total, times, self.validate, self._prepare_to_save):
            self.step(step)
        self.steps.checkpoints.finish()
        self.generation.finish_generation()
        self.policy.prepare_for_logprob()
        self.metrics.log(total, under("refit", self.check_refit()))

    def step(self, step: int) -> None:
        """One rollout and the optimizer steps on it."""
        timer, config = Timer(), self.config
        with timer("total_step_time"):
            with timer("data_processing"):
                first = (step - 1) * config.num_prompts_per_step
                problems = [self.training.problem(first + place) for place in range(config.num_prompts_per_step)]
            with timer("generation"):
                rollout = self.collector.collect(problems, self._sampling(step))
            with timer("generation_sleep"):
                memory = self.generation.finish_generation()
            with timer("advantage_calculation"):
                rewards_PG = rollout.rewards_B.view(-1, config.num_generations_per_prompt)
                advantages_PG = group_advantages(
                    rewards_PG, config.use_leave_one_out_baseline, config.normalize_rewards
                )
            with timer("logprob_inference_prep"):
                self.policy.prepare_for_logprob()
            with timer("refit_check"):
                checked = self.check_refit()
            with timer("policy_and_reference_logprobs"):
                batch = self._batch(rollout, advantages_PG)
            with timer("training_prep"):
                self.policy.prepare_for_training()
            with timer("policy_training"):
                trained = self.policy.train(batch, GRPOLoss(config.loss_fn))
            with timer("checkpointing"):
                self.steps.checkpoints.save_if_due(step, step == config.max_num_steps)
            with timer("prepare_for_generation/transfer_and_update_weights"):
                refitted = self.refit()
        mismatch = mismatch_metrics(batch["previous_logprobs"], rollout.generation_logprobs_BT, rollout.mask_BT)
        self._warn_of_mismatch(step, mismatch["token_mult_prob_error"])
        seconds = timer.take()
        self.metrics.log(
            step,
            under("train", rollout.metrics() | baseline_metrics(rewards_PG, advantages_PG) | trained | mismatch)
            | under("train", _counts(rollout))
            | under("timing/train", seconds)
            | under("performance", self._throughput(rollout, seconds))
            | under("refit", refitted | checked)
            | under("offload", move_metrics(self.policy.take_moves()))
            | under("memory", with_rest("generate", memory | self.policy.take_memory()))
            | under("ray", self.system()),
        )
        shown = {"reward": rollout.rewards_B.mean().item(), "loss": trained["loss"]}
        if "kl_penalty" in trained:
            shown["kl"] = trained["kl_penalty"]
        self.console.step(step, config.max_num_steps, shown, seconds, self.metrics.series("train/reward")[1])
        self.on_rollout(step, "train", rollout)

    def validate(self, step: int) -> dict[str, float]:
        """Mean reward on the held-out problems (`accuracy`), one response each at `val_temperature`."""
        timer = Timer()
        with (
            timer("total_validation_time"),
            self.console.busy(f"validating on {len(self.validation)} held-out problems"),
        ):
            sampling = replace(self._sampling(step), samples_per_prompt=1)
            if self.config.val_temperature == 0:
                sampling = sampling.greedy()
            else:
                sampling = replace(sampling, temperature=self.config.val_temperature)
            rollout = self.collector.collect(self.validation, sampling)
        accuracy = rollout.rewards_B.mean().item()
        measured = {"accuracy": accuracy, "avg_length": rollout.mask_BT.sum().item() / len(self.validation)}
        self.metrics.log(step, under("validation", measured) | under("timing/validation", timer.take()))
        self.console.say(f"validation after step {step}: accuracy {accuracy:.3f}")
        self.on_rollout(step, "validation", rollout)
        return measured

    def _prepare_to_save(self) -> None:
        self.generation.finish_generation()
        self.policy.prepare_for_training()

    def _sampling(self, step: int) -> Sampling:
        """Sampling of one step: the seed depends on run and step alone, so a repeated step samples the same."""
        seed = self.config.seed * 1_000_003 + step
        return replace(self.sampling, samples_per_prompt=self.config.num_generations_per_prompt, seed=seed % 2**31)

    def _batch(self, rollout: Rollout, advantages_PG: Tensor) -> Batch:
        batch = {
            "tokens": rollout.tokens_BT,
            "lengths": rollout.lengths_B,
            "mask": rollout.mask_BT,
            "generation_logprobs": rollout.generation_logprobs_BT,
            "previous_logprobs": self.policy.logprobs(rollout.tokens_BT, rollout.lengths_B),
            "advantages": advantages_PG.flatten(),
        }
        if self.config.loss_fn.reference_policy_kl_penalty > 0:
            batch["reference_logprobs"] = self.policy.reference_logprobs(rollout.tokens_BT, rollout.lengths_B)
        return batch

    def _warn_of_mismatch(self, step: int, factor: float) -> None:
        if factor > self.mismatch_warning:
            log.warning(
                "step %d: policy and generation engine disagree by a factor of %.3f a token on average (limit %.3f, "
                "logger.mismatch_warning). Either the refit, the precision or the sampling settings differ.",
                step,
                factor,
                self.mismatch_warning,
            )

    def _throughput(self, rollout: Rollout, seconds: dict[str, float]) -> dict[str, float]:
        samples, tokens = rollout.tokens_BT.shape[0], rollout.metrics()["total_num_tokens"]
        total = seconds["total_step_time"]
        return {
            "samples_per_sec": samples / total,
            "tokens_per_sec": tokens / total,
            "policy_training_tokens_per_sec": tokens / seconds["policy_training"],
            "policy_and_reference_logprobs_tokens_per_sec": tokens / seconds["policy_and_reference_logprobs"],
            "generation_tokens_per_sec": rollout.mask_BT.sum().item() / seconds["generation"],
            "tokens_per_sec_per_gpu": tokens / total / self.devices,
        }


def _counts(rollout: Rollout) -> dict[str, float]:
    sequences = (rollout.mask_BT.sum(dim=1) > 0).sum().item()
    tokens = rollout.mask_BT.sum().item()
    return {"global_valid_seqs": sequences, "global_valid_toks": tokens, "num_valid_samples": sequences}
