"""Group relative policy optimisation, top to bottom: generate -> logprob -> train -> refit.

On-policy distillation uses the same loop: a teacher computes logprobs in the logprob phase, and the loss reads them.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_rl_lite.algorithms.loop import Report, Steps, ValidationTimes
from nemo_rl_lite.algorithms.rollout_log import RolloutLog
from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.losses.advantages import (
    advantage_metrics,
    clip_advantages,
    group_advantages,
    separate_advantages,
    turn_advantages,
)
from nemo_rl_lite.losses.interface import Loss
from nemo_rl_lite.observability.signal import WeakSignals
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.observability.trackers import under
from nemo_rl_lite.offload.mover import Move, move_metrics
from nemo_rl_lite.policy.interface import BatchRef, Policy, Scored, Teacher
from nemo_rl_lite.rollout.collector import Show
from nemo_rl_lite.rollout.episode import Advantage
from nemo_rl_lite.rollout.mixture import metrics_by_source, validation_by_source
from nemo_rl_lite.rollout.rollout import Rollout, pass_at_k, passes
from nemo_rl_lite.rollout.source import RolloutSource

log = logging.getLogger(__name__)

# Metrics of divergences, and their labels on the terminal.
_SHOWN_KL = {"kl_penalty": "kl", "teacher_kl": "kl to teacher"}


class _Ready(NamedTuple):
    """A rollout whose rows the policy has."""

    batch: BatchRef
    advantages: Sequence[Advantage]
    checked: dict[str, float]
    """Metrics of the refit's check."""
    moves: dict[str, Move]
    """The teacher's moves."""
    memory: dict[str, float]


@dataclass(kw_only=True)
class GRPO:
    """GRPO and on-policy distillation."""

    config: GRPOConfig
    total: int
    """Number of steps after which the run ends."""
    loss: Loss
    policy: Policy
    teacher: Teacher | None
    rollouts: RolloutSource
    scored: Sequence[Scored]
    """Models that need a separate logprob pass."""
    decoding_speed: Callable[[], dict[str, float]] = dict
    """Decoding rates of the engines since the last call."""
    take_recovered: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """See `RecoveringGeneration.take_recovered`."""
    check: Callable[[], dict[str, float]] = dict
    """Compares the engines' probe after the last refit with the policy, which is in its logprob or training phase."""
    note_mismatch: Callable[[int, float], None] = lambda step, nats: None
    """See `MismatchBudget.note`."""
    log: RolloutLog
    held_out: int
    """Number of held-out problems."""
    held_out_label: str
    """Label of the mean reward on them."""
    steps: Steps
    report: Report
    signals: WeakSignals
    advise: Callable[[Sequence[Mapping[str, float]]], Iterable[str]] = lambda history: ()
    """Yields advice at a checkpoint, from the metrics of the steps so far."""
    mismatch_warning: float
    reward_weights: Mapping[str, float]
    """Weights of reward terms, by name."""

    def run(self) -> None:
        config, step, setup = self.config, self.steps.done, Timer()
        with setup("first_refit"):
            refitted = self.rollouts.publish(step)
        self.report.metrics.log(step, under("refit", refitted) | under("timing/setup", setup.take()))
        times = ValidationTimes(config.val_period, config.val_at_start, config.val_at_end)
        for step in self.steps.until(self.total, times, self.validate, self._prepare_to_save):
            self.step(step)
        self.steps.checkpoints.finish()
        self.rollouts.finish_generation()
        self.policy.prepare_for_logprob()
        self.report.metrics.log(step, under("refit", self.check()))

    def step(self, step: int) -> None:
        """Take one rollout and the optimizer steps on it."""
        timer, config, cpu_s = Timer(), self.config, time.process_time()
        with timer("total_step_time"):
            rollout = self._generate(step, self.rollouts.take, timer)
            while (ready := self._put(step, rollout, timer)) is None:
                rollout = self._generate(step, self.rollouts.take_again, timer)
            batch, advantages, checked, moves, memory = ready
            with timer("policy_and_reference_logprobs"):
                if self.scored:
                    self.policy.score(batch, self.scored)
            with timer("training_prep"):
                self.policy.prepare_for_training()
            with timer("policy_training"):
                trained = self.policy.train(batch, self.loss)
            self.log.scored(step, rollout, partial(self.policy.write_scores, batch, self.loss))
            ages = rollout.ages(step - 1)
            if not ages["trajectory_age_max"]:
                # A stale rollout's mismatch includes policy drift.
                self.note_mismatch(step, trained["gen_kl_error"])
                self._warn_of_mismatch(step, trained["token_mult_prob_error"])
            if config.ref_model_sync_steps and "reference" in self.scored and step % config.ref_model_sync_steps == 0:
                with timer("reference_sync"):
                    self.policy.follow_policy(config.ref_model_mixup_alpha)
            with timer("generation"), self.report.console.busy(f"step {step + 1}: generating", announced=False) as show:
                self.rollouts.wait_until_idle(show)
            with timer("checkpointing"):
                saves = self.steps.checkpoints.save_if_due(step, step == self.total)
            with timer("prepare_for_generation/transfer_and_update_weights"):
                refitted = self.rollouts.publish(step)
        seconds, sampled, by_source = timer.take(), rollout.metrics(), metrics_by_source(rollout)
        speed = {"generation_tokens_per_sec": rollout.generated / rollout.took_s} | self.decoding_speed()
        speed["launcher_cpu_s"] = time.process_time() - cpu_s
        if self.scored:
            scoring_s = seconds["policy_and_reference_logprobs"]
            speed["policy_and_reference_logprobs_tokens_per_sec"] = sampled["total_num_tokens"] / scoring_s
        shown = {"reward": sampled["reward"]}
        shown |= {"kept": sampled["filtered_reward"]} if sampled["filtered_prompts"] else {}
        rewards = {
            f"reward of {name.split('/')[1]}": value for name, value in by_source.items() if name.endswith("/reward")
        }
        shown |= rewards | {"loss": trained["loss"]}
        shown |= {label: trained[name] for name, label in _SHOWN_KL.items() if name in trained}
        shown |= {} if rollout.engines_idle_s is None else {"age": ages["trajectory_age_mean"]}
        shown |= {"reward errors": sampled["reward_errors"]} if rollout.reward_errors else {}
        shown |= {"environment errors": sampled["environment_errors"]} if rollout.environment_errors else {}
        taken_over, repeated = self.take_recovered()
        recovered = {"taken_over_tokens": rollout.resumed_tokens + taken_over, "repeated_tokens": repeated}
        recovered = {name: float(count) for name, count in recovered.items() if count}
        shown |= {name.replace("_", " "): count for name, count in recovered.items()}
        shown |= {"preemptions": speed["preemptions"]} if speed.get("preemptions") else {}
        shown |= self.signals.shown(sampled)
        self.report.step(
            step,
            self.total,
            len(rollout.episodes),
            sampled | by_source | ages | advantage_metrics(torch.from_numpy(np.hstack(advantages))) | trained,
            seconds,
            self.policy.work(batch, self.scored),
            shown,
            under("performance", speed)
            | under("offload", move_metrics(moves))
            | under("refit", refitted | checked)
            | under("timing/rollout", rollout.seconds())
            | under("rollout", recovered),
            memory,
        )
        news = [*self.signals.news(sampled), *(self.advise(self.report.metrics.history) if saves else ())]
        for sentence in news:
            self.report.console.say(f"step {step}: {sentence}")
        self.log.end(step, "train", rollout, timer.phases)

    def _generate(self, step: int, take: Callable[[int, Show], Rollout], timer: Timer) -> Rollout:
        with timer("generation"), self.report.console.busy(f"step {step}: generating", announced=False) as show:
            return take(step, show)

    def _put(self, step: int, rollout: Rollout, timer: Timer) -> _Ready | None:
        """Give the policy the rows of a rollout. Return None if a rollout worker died with some of them."""
        try:
            with timer("generation_sleep"):
                memory = self.rollouts.finish_generation()
            with timer("advantage_calculation"):
                advantages = rollout.spread_over_turns(self._advantages(rollout))
                rollout.advantages = advantages
            self.log.begin(step, "train", rollout)
            rows = rollout.rows(advantages, step - 1)
            with timer("logprob_inference_prep"):
                scores = self.scored or self.teacher is not None
                (self.policy.prepare_for_logprob if scores else self.policy.prepare_for_training)()
            with timer("refit_check"):
                checked = self.check()
            moves: dict[str, Move] = {}
            if self.teacher is not None:
                with timer("teacher_logprob_inference"):
                    rows = self.teacher.scored(rows, rollout.row_sources(rows))
                moves, memory = self.teacher.pop_moves(), memory | self.teacher.pop_memory()
            with timer("policy_and_reference_logprobs"):
                batch = self.policy.put_batch(rows)
        except WorkerError:
            if not rollout.has_died():
                raise
            return None
        return _Ready(batch, advantages, checked, moves, memory)

    def _advantages(self, rollout: Rollout) -> Tensor:
        """Return the advantages of turns, or of episodes as one turn, [T, P, G]."""
        config, baseline, returns_TPG = self.config, self.config.use_leave_one_out_baseline, rollout.returns_TPG
        if config.normalize_rewards == "parts":
            parts_NPG = rollout.parts_NB(self.reward_weights).view(-1, *returns_TPG.shape[1:])
            found_TPG = separate_advantages(parts_NPG, [*self.reward_weights.values(), 1.0], baseline)[None]
        elif config.pass_at_k is not None:
            found_TPG = group_advantages(returns_TPG[0], baseline, config.normalize_rewards, config.pass_at_k)[None]
        else:
            found_TPG = turn_advantages(returns_TPG, baseline, config.normalize_rewards)
        return clip_advantages(found_TPG, config.advantage_clip_low, config.advantage_clip_high)

    def validate(self, step: int) -> dict[str, float]:
        """Measure the mean reward on the held-out problems (`accuracy`), and pass@k with several responses each."""
        timer, what = Timer(), f"validating on {self.held_out} held-out problems"
        with timer("total_validation_time"), self.report.console.busy(what) as show:
            rollout = self.rollouts.held_out(step, show)
        samples, rewards_B = self.config.val_samples_per_problem, rollout.rewards_B
        measured = {"accuracy": rewards_B.nanmean().item(), "avg_length": rollout.generated / len(rewards_B)}
        if samples > 1:
            passed_P = passes(rewards_B.view(-1, samples).numpy()).sum(axis=1)
            measured["pass_at_k"] = float(pass_at_k(passed_P, samples, samples).mean())
        measured |= validation_by_source(rollout) | rollout.episode_metrics()
        at_k = f", pass@{samples} {measured['pass_at_k']:.3f}" if samples > 1 else ""
        self.report.validation(step, measured, timer, f"{self.held_out_label} {measured['accuracy']:.3f}{at_k}")
        self.log.begin(step, "validation", rollout)
        self.log.end(step, "validation", rollout, timer.phases)
        return measured

    def _prepare_to_save(self) -> None:
        self.rollouts.finish_generation()
        self.policy.prepare_for_training()

    def _warn_of_mismatch(self, step: int, factor: float) -> None:
        if not factor <= self.mismatch_warning:
            log.warning(
                "step %d: logprobs of policy and generation engine differ by a factor of %.3f per token on average "
                "(limit %.3f, logger.mismatch_warning): check refit, precision and sampling settings",
                step,
                factor,
                self.mismatch_warning,
            )
