"""A GRPO run: its data, its workers, the loop."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_lite.algorithms.grpo import GRPO
from nemo_rl_lite.algorithms.loop import Report
from nemo_rl_lite.checkpoint.resume import Start
from nemo_rl_lite.cluster.system_usage import SystemUsage
from nemo_rl_lite.config.algorithms import compares, has_teacher
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import GRPOConfig
from nemo_rl_lite.config.sizes import all_gpus, policy_ranks, previous_passes, repeats_first_pass
from nemo_rl_lite.data.formats import problems
from nemo_rl_lite.data.odd_texts import check_stop_strings, check_texts
from nemo_rl_lite.data.sources import training_set, validation_set
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.generation.interface import Generation, Sampling
from nemo_rl_lite.losses.registry import make_loss
from nemo_rl_lite.models.shape import described_shape
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog
from nemo_rl_lite.observability.start_up import report_start
from nemo_rl_lite.observability.timer import Phase, Timer
from nemo_rl_lite.policy.interface import Scored
from nemo_rl_lite.rewards.judge import make_judge, terms_of, try_reward
from nemo_rl_lite.rewards.program import check_programs
from nemo_rl_lite.rollout.collector import ErrorShares, RolloutCollector
from nemo_rl_lite.rollout.episode import Rollout
from nemo_rl_lite.rollout.play import EpisodeRunner
from nemo_rl_lite.rollout.prompts import fitting_prompts
from nemo_rl_lite.rollout.queue import AsyncRolloutSource, Staleness
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder, Sampler
from nemo_rl_lite.rollout.source import OnPolicy, RolloutSource
from nemo_rl_lite.rollout.store import RolloutFiles, Split, load_rollouts
from nemo_rl_lite.rules.steps import check_epochs
from nemo_rl_lite.run.jobs.playing import Playing
from nemo_rl_lite.run.jobs.steps import make_steps
from nemo_rl_lite.run.memory_plan import show_memory_plan
from nemo_rl_lite.run.speed import decoding_speed, policy_speed
from nemo_rl_lite.run.teacher import check_same_tokens
from nemo_rl_lite.run.workers.launch import Workers, launch
from nemo_rl_lite.run.workers.recovery import RecoveringGeneration
from nemo_rl_lite.run.workers.reserve import Begun

# Samples that the terminal shows, the worst and the best, and that trackers get.
SHOWN, TRACKED = 2, 16
# Keys that decide what a rollout is.
_OF_ROLLOUTS = (
    *("algorithm.seed.", "algorithm.num_", "algorithm.use_dynamic_sampling.", "algorithm.overlong_filtering."),
    *("algorithm.reward_shaping.", "data.", "reward.", "environment.", "agent.", "generation."),
    *("policy.model_name.", "policy.max_total_sequence_length."),
)


class GRPOJob:
    """Reads and checks everything when it is made; waits for its workers when it runs."""

    def __init__(self, config: Config, folder: Path, console: RunConsole, model_path: Path):
        self._config, self._folder, self._console, self._model_path = config, folder, console, model_path
        self._judge = make_judge(config.reward)
        self._playing = Playing(config)
        kind = problems(self._playing.tools)
        training = training_set(config.data, config.algorithm.seed, kind)
        validation = validation_set(config.data, config.algorithm.max_val_samples, kind, training.finite())
        self._tokenizer = ChatTokenizer(model_path, config.policy.tokenizer.chat_template_kwargs)
        if has_teacher(config):
            check_same_tokens(self._tokenizer, config)
        if any(problem.tools for problem in (training.problem(0), *training.finite(), *validation)):
            self._tokenizer.check_tools()
        with console.busy("checking that every prompt fits"):
            fitted = fitting_prompts(training, validation, self._tokenizer, config)
        self._training, self._validation = fitted
        self._epoch_length = len(self._training.finite())
        check_epochs(config, self._epoch_length)
        check_texts(self._tokenizer, self._training)
        check_stop_strings(self._tokenizer, config.generation.stop_strings)
        check_programs(config.reward, self._training)
        try_reward(self._judge, self._training.problem(0))

    def run(self, metrics: MetricsLog, begun: Begun, start: Start, setup: Timer) -> dict[str, int]:
        """See `Job.run`; the memory is by the workers' names."""
        config, console = self._config, self._console
        with setup("memory_plan"):
            show_memory_plan(config, self._model_path, console, metrics, start.steps)
        with console.busy(f"starting {policy_ranks(config)} policy rank(s) and {config.generation.backend}"):
            first = self._training.problem(0)
            probe_prompt = self._tokenizer.prompt(first.messages, first.tools)
            workers = launch(begun, probe_prompt, start.policy, setup, console.say)
        report_start(setup, start.steps, metrics, console)
        with self._playing.through(workers.generation, self._tokenizer, self._folder, console.say) as (
            generation,
            play,
        ):
            loop = self._loop(metrics, start, workers, self._collector(generation, play))
            try:
                loop.run()
            finally:
                loop.rollouts.close()
        workers.policy.release_host_memory()
        if config.checkpoint.export_hf_at_end:
            workers.policy.export_hf(str(self._folder / "hf"))
        # A failed checkpoint is an error only now that the trained weights are exported.
        loop.steps.checkpoints.require()
        return workers.peak_memory()

    def _loop(self, metrics: MetricsLog, start: Start, workers: Workers, collector: RolloutCollector) -> GRPO:
        config, console, groups = self._config, self._console, workers.groups
        options = config.options(GRPOConfig)
        saved: dict[str, Any] = {"position": start.steps * options.num_prompts_per_step, **start.rollouts}
        resting = PromptCooldown(options.rest_epochs, self._epoch_length, saved.get("resting"), saved["position"])
        order = PromptOrder(self._training, resting, saved)
        sampling = Sampling.of(config.generation, self._tokenizer.end_tokens)
        sampler = Sampler(options, collector, sampling, self._validation, order)
        rollouts = self._source(sampler, workers.generation, start)
        steps = make_steps(config, self._folder, start, workers.policy, metrics, console, groups, rollouts.save)
        devices = all_gpus(config) or policy_ranks(config)
        system = SystemUsage([process for group in groups for process in group.processes])
        return GRPO(
            config=options,
            loss=make_loss(options),
            policy=workers.policy,
            teacher=workers.teacher,
            sampling=sampling,
            rollouts=rollouts,
            scored=_scored(config),
            decoding_speed=decoding_speed(config, described_shape(self._model_path), workers.generation),
            check=workers.weights.check,
            keep=self._rollout_log(metrics, start),
            held_out=len(self._validation),
            steps=steps,
            report=Report(metrics, console, workers.policy, devices, policy_speed(config), system.take),
            mismatch_warning=config.logger.mismatch_warning,
            reward_weights={term.label: term.weight for term in terms_of(config.reward)},
        )

    def _source(self, sampler: Sampler, generation: RecoveringGeneration, start: Start) -> RolloutSource:
        options = self._config.options(GRPOConfig)
        staleness = _staleness(options)
        ahead = load_rollouts(start.folder) if staleness and start.folder and _samples_the_same(start) else []
        if not ahead:
            # Those in the checkpoint, if there are any, are not what this run would sample: it samples their prompts.
            sampler.order.give_back(start.rollouts.get("ahead", ()))
        if staleness is None:
            return OnPolicy(sampler, generation)
        stall_s = self._config.cluster.phase_timeout_s or math.inf
        done, steps, saves = start.steps, options.max_num_steps, options.rollouts.save_begun
        return AsyncRolloutSource(sampler, generation, staleness, done, steps, ahead, stall_s, saves)

    def _collector(self, generation: Generation, play: EpisodeRunner) -> RolloutCollector:
        config = self._config
        taking_part = config.agent if play.section == "agent" else config.environment
        shares = ErrorShares(config.reward.max_error_share, taking_part.max_error_share)
        max_length = config.policy.max_total_sequence_length
        return RolloutCollector(generation, self._tokenizer, self._judge, max_length, shares, play)

    def _rollout_log(self, metrics: MetricsLog, start: Start) -> Callable[[int, Split, Rollout, Sequence[Phase]], None]:
        options, console = self._config.logger, self._console
        files, period = RolloutFiles(self._folder, options.log_samples, start.steps), options.show_samples_period

        def keep(step: int, split: Split, rollout: Rollout, phases: Sequence[Phase]) -> None:
            files.write(step, split, rollout, phases)
            if split == "train" and period and step % period == 0:
                console.samples(step, rollout.samples(SHOWN))
                metrics.log_samples(step, rollout.samples(TRACKED))

        return keep


def _scored(config: Config) -> list[Scored]:
    """Whose logprobs a rollout gets before training."""
    own: list[Scored] = ["previous" if repeats_first_pass(config) else "later"] if previous_passes(config) else []
    return [*own, "reference"] if compares(config) else own


def _samples_the_same(start: Start) -> bool:
    """Whether nothing has changed since the checkpoint that decides what a rollout is."""
    keys = [line.partition(":")[0] for line in start.changes]
    return not any(f"{key}.".startswith(_OF_ROLLOUTS) for key in keys)


def _staleness(options: GRPOConfig) -> Staleness | None:
    """How old rollouts may be; None where the weights that train are those that sampled."""
    rollouts = options.rollouts
    if rollouts.source == "on_policy":
        return None
    if rollouts.source == "one_step_off":
        return Staleness(max_age=1, in_flight=False)
    return Staleness(rollouts.max_trajectory_age_steps, rollouts.in_flight_weight_updates)
