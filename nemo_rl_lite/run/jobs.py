"""The jobs of all algorithms: data, workers and loop of GRPO and distillation, and of SFT, DPO, ORPO and KTO."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_lite.algorithms.grpo import GRPO
from nemo_rl_lite.algorithms.loop import Report, Steps, shown_limits, total_steps
from nemo_rl_lite.algorithms.rollout_log import RolloutLog
from nemo_rl_lite.algorithms.supervised import Supervised
from nemo_rl_lite.checkpoint.resume import Start, checkpoint_store
from nemo_rl_lite.checkpoint.store import Checkpoints, SaveRollouts
from nemo_rl_lite.cluster.heartbeat import SystemUsage
from nemo_rl_lite.cluster.workers import StepProfiler, WorkerGroup
from nemo_rl_lite.config.algorithms import compares, has_teacher
from nemo_rl_lite.config.keys import flatten
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.schema_algorithm import GRPOConfig, SupervisedConfig
from nemo_rl_lite.config.sizes import (
    all_gpus,
    generates_ahead,
    keeps_partial_rollouts,
    policy_ranks,
    previous_passes,
    repeats_first_pass,
    rollout_workers,
)
from nemo_rl_lite.config.sources import ONLY, naming_source, source_configs, source_weights
from nemo_rl_lite.data.examples import Encoder, training_examples, validation_examples
from nemo_rl_lite.data.formats import problems
from nemo_rl_lite.data.mixture import items_per_epoch
from nemo_rl_lite.data.problems import Problem, TrainingSet
from nemo_rl_lite.data.sources import data_identity, training_set, validation_set
from nemo_rl_lite.data.tokenizer import ChatTokenizer, check_stop_strings, check_texts
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.generation.interface import Generation, Sampling
from nemo_rl_lite.losses.interface import make_loss
from nemo_rl_lite.models.shape import known_shape
from nemo_rl_lite.observability.callbacks import Callbacks
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.environment import described
from nemo_rl_lite.observability.signal import WeakSignals
from nemo_rl_lite.observability.timer import Timer, seconds_since_start
from nemo_rl_lite.observability.trackers import MetricsLog
from nemo_rl_lite.planning.advice import Advice
from nemo_rl_lite.policy.interface import Policy, Scored, Teacher
from nemo_rl_lite.rewards.judge import terms_of
from nemo_rl_lite.rollout.collector import RolloutCollector
from nemo_rl_lite.rollout.groups import LocalPlayers, Playground
from nemo_rl_lite.rollout.mixture import mixed_order
from nemo_rl_lite.rollout.playing import Playing, error_shares
from nemo_rl_lite.rollout.queue import AsyncRolloutSource, Staleness
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder, Sampler, fitting_prompts
from nemo_rl_lite.rollout.saved import load_rollouts
from nemo_rl_lite.rollout.source import OnPolicy, RolloutSource
from nemo_rl_lite.rollout.store import RolloutFiles
from nemo_rl_lite.run.folder import write_data_identity
from nemo_rl_lite.run.model import check_same_tokens, decoding_speed, policy_speed
from nemo_rl_lite.system.pool import ending_pools
from nemo_rl_lite.system.stopping import Stopping, seconds
from nemo_rl_lite.validation.data import check_epochs
from nemo_rl_lite.validation.notes import note_total_steps
from nemo_rl_lite.validation.rewards import held_out_label
from nemo_rl_lite.workers.budget import RestartBudget
from nemo_rl_lite.workers.launch import Workers, launch, launch_policy, peak_memory
from nemo_rl_lite.workers.policy import RemotePolicy
from nemo_rl_lite.workers.recovery import RecoveringGeneration
from nemo_rl_lite.workers.reserve import StartingWorkers

# Keys that change the content of rollouts.
OF_ROLLOUTS = (
    *("algorithm.seed.", "algorithm.num_", "algorithm.use_dynamic_sampling.", "algorithm.overlong_filtering."),
    *("algorithm.reward_shaping.", "data.", "reward.", "environment.", "agent.", "generation."),
    *("policy.model_name.", "policy.max_total_sequence_length."),
)


class _AlgorithmJob:
    """Common parts of the jobs."""

    _data: Mapping[str, Any]

    def __init__(self, config: Config, folder: Path, console: RunConsole, model_path: Path):
        self._config, self._folder, self._console, self._model_path = config, folder, console, model_path

    def _limit_steps(self, per_epoch: Fraction | int | None) -> None:
        """Set the number of steps, and say which limit it follows from."""
        algorithm = self._config.algorithm
        self._total = total_steps(algorithm, per_epoch)
        note_total_steps(self._config, self._total)
        if limits := shown_limits(algorithm, per_epoch):
            self._console.say(limits)

    def resume_lines(self, start: Start) -> Iterator[str]:
        """See `Job.resume_lines`."""
        key, epochs = "algorithm.max_num_epochs", self._config.algorithm.max_num_epochs
        asks_for_more = any(change.startswith("algorithm.max_num_") for change in start.changes)
        # A run that ended before its final export resumes from its own last checkpoint.
        if start.steps > self._total or (start.steps == self._total and asks_for_more):
            rule = f"gives {self._total} steps, but {start.folder} is at step {start.steps}"
            raise ConfigError([Violation(key, epochs, rule, f"{key}={(epochs or 0) + 1}, or {key}=null")])
        return start.data_lines(self._data)

    def _steps(
        self,
        metrics: MetricsLog,
        start: Start,
        policy: Policy,
        groups: Callable[[], Sequence[WorkerGroup]],
        callbacks: Callbacks,
        rollouts: SaveRollouts = lambda folder: {},
    ) -> Steps:
        """Run the steps after `start`. `groups`: the workers that live, for the profiler; `rollouts` saves the state of
        the rollout source in checkpoints."""
        config, options = self._config, self._config.checkpoint
        write_data_identity(self._folder, self._data)
        checkpoints = Checkpoints(
            checkpoint_store(config, self._folder),
            policy,
            options.save_period,
            options.async_save,
            {"config": described(config), "data": dict(self._data)},
            self._console.say,
            saved=start.steps or None,
            rollouts=rollouts,
        )
        stopping = Stopping(seconds(options.must_save_by) if options.save_period else None, seconds_since_start)
        around = StepProfiler(config.profile, self._folder, groups).around
        return Steps(start.steps, checkpoints, stopping, metrics, config.policy.max_skipped_steps, around, callbacks)

    def _finish(self, policy: RemotePolicy, steps: Steps, groups: Sequence[WorkerGroup]) -> dict[str, int]:
        """Export the model; return each worker's peak memory."""
        policy.release_host_memory()
        if self._config.checkpoint.exports:
            policy.export_hf(str(self._folder / "hf"))
        # Raise for a failed checkpoint only after the export.
        steps.checkpoints.require()
        return peak_memory(groups)


class GRPOJob(_AlgorithmJob):
    """The `Job` of GRPO and distillation."""

    def __init__(self, config: Config, folder: Path, console: RunConsole, model_path: Path):
        super().__init__(config, folder, console, model_path)
        # Rollout workers have their own processes for user code.
        with ending_pools() if rollout_workers(config) else nullcontext():
            self._playing = Playing(config)
            self._read_data()

    def _read_data(self) -> None:
        """Read and check the data of each source, and try the user code on its first problem."""
        config, console, sources = self._config, self._console, source_configs(self._config)
        self._training, self._validation = dict[str, TrainingSet[Problem]](), list[Problem]()
        read = {name: self._read(name, one) for name, one in sources.items()}
        self.tokenizer = ChatTokenizer(self._model_path, config.policy.tokenizer.chat_template_kwargs)
        if has_teacher(config):
            check_same_tokens(self.tokenizer, config)
        for name, (training, validation) in read.items():
            with naming_source(name), console.busy("checking that every prompt fits"):
                if any(problem.tools for problem in (training.problem(0), *training.finite(), *validation)):
                    self.tokenizer.check_tools()
                fitted = fitting_prompts(training, validation, self.tokenizer, sources[name])
            self._training[name] = fitted[0]
            self._validation += fitted[1]
        rows = [row for one in self._training.values() for row in one.finite()]
        self._data = data_identity(rows, self._validation)
        prompts = items_per_epoch(
            {name: len(one.finite()) for name, one in self._training.items()}, source_weights(config)
        )
        check_epochs(config, prompts)
        self._limit_steps(Fraction(prompts, config.options(GRPOConfig).num_prompts_per_step))
        check_stop_strings(self.tokenizer, config.generation.stop_strings)
        for one in self._training.values():
            check_texts(self.tokenizer, one)
            self._playing.try_reward(one.problem(0))
            self._playing.try_environment(one.problem(0))

    def _read(self, name: str, source: Config) -> tuple[TrainingSet[Problem], list[Problem]]:
        """Return training and validation problems of a source."""
        options, kind = source.algorithm, problems(self._playing.tools[name], name)
        with naming_source(name):
            training = training_set(source.data, options.seed, kind)
            return training, validation_set(source.data, options.max_val_samples, kind, training.finite())

    def problem(self, position: int) -> Problem:
        """Return a training problem of the first source; see `TrainingSet`."""
        return next(iter(self._training.values())).problem(position)

    def launch(
        self, begun: StartingWorkers, start: Start, setup: Timer, budget: RestartBudget
    ) -> Callable[..., dict[str, int]]:
        """See `Job.launch`."""
        config, console = self._config, self._console
        with console.busy(f"starting {policy_ranks(config)} policy rank(s) and {config.generation.backend}"):
            first = self.problem(0)
            probe_prompt = self.tokenizer.prompt(first.messages, first.tools)
            workers = launch(begun, probe_prompt, start.policy, budget, setup, console.say)
        return partial(self._train, workers, start)

    def _train(self, workers: Workers, start: Start, metrics: MetricsLog, callbacks: Callbacks) -> dict[str, int]:
        with self._playground(workers) as playground:
            collector = RolloutCollector(playground, error_shares(self._config))
            started = self._with_order(start)
            source = self._source(self._sampler(started, collector), workers.generation, started)
            shape = known_shape(self._model_path)
            generation, weights = workers.generation, workers.weights
            of_engines: dict[str, Any] = {
                "decoding_speed": decoding_speed(self._config, shape, generation.take_decoded),
                "check": weights.verify_with_probe,
                "take_recovered": generation.take_recovered,
            }
            # Engines with requests in progress do not restart.
            if not generates_ahead(self._config):
                of_engines["note_mismatch"] = generation.mismatch.note
            if advice := Advice.of(self._folder, shape):
                of_engines["advise"] = advice.news
            own = workers.policy, workers.teacher, source, lambda: workers.groups
            loop = self._loop(metrics, start, *own, callbacks, **of_engines)
            try:
                loop.run()
            finally:
                loop.rollouts.close()
        return self._finish(workers.policy, loop.steps, workers.groups)

    def resume_lines(self, start: Start) -> Iterator[str]:
        """See `Job.resume_lines`."""
        own = self._with_order(start)
        if start.steps and own is not start:
            which = "only this run" if self._config.data.sources else "only the checkpoint"
            yield f"changed since then  {which} has data.sources: step {start.steps + 1} begins with the first prompts"
        yield from super().resume_lines(own)

    def _with_order(self, start: Start) -> Start:
        """Return the start without its order of prompts if either the checkpoint or this run has sources, not both."""
        if bool(self._config.data.sources) == ("sources" in start.rollouts):
            return start
        held_out = {name: value for name, value in start.data.items() if name == "validation"}
        return replace(start, rollouts={"position": 0}, data=held_out)

    def _playground(self, workers: Workers) -> AbstractContextManager[Playground]:
        """Return the rollout workers, or the players of this process."""
        if workers.rollouts is not None:
            return closing(workers.rollouts)
        return self.players(workers.generation)

    def players(self, generation: Generation) -> AbstractContextManager[LocalPlayers]:
        """Return the players of this process; see `Playing.players`."""
        return self._playing.players(generation, self.tokenizer, self._folder, self._console.say)

    def _sampler(self, start: Start, collector: RolloutCollector) -> Sampler:
        config, options = self._config, self._config.options(GRPOConfig)
        saved: dict[str, Any] = {"position": start.steps * options.num_prompts_per_step, **start.rollouts}
        mixed = config.data.sources
        order = mixed_order(source_weights(config), self._order, saved) if mixed else self._order(ONLY, saved)
        sampling = Sampling.of(config.generation, self.tokenizer.end_tokens)
        limits = {name: one.max_new_tokens for name, one in mixed.items()}
        useful = saved.get("useful_share", 1.0)
        return Sampler(options, collector, sampling, self._validation, order, useful, limits)

    def _loop(
        self,
        metrics: MetricsLog,
        start: Start,
        policy: RemotePolicy,
        teacher: Teacher | None,
        rollouts: RolloutSource,
        groups: Callable[[], Sequence[WorkerGroup]],
        callbacks: Callbacks,
        **of_engines: Any,
    ) -> GRPO:
        """Return the loop. `groups`: the workers that live. For the rest see `GRPO`."""
        config, console = self._config, self._console
        options, values = config.options(GRPOConfig), dict(flatten(described(config)))
        steps = self._steps(metrics, start, policy, groups, callbacks, rollouts.save)
        files = RolloutFiles(self._folder, config.logger.log_samples, start.steps)
        devices = all_gpus(config) or policy_ranks(config)
        system = SystemUsage(lambda: [process for group in groups() for process in group.processes])
        return GRPO(
            config=options,
            total=self._total,
            loss=make_loss(options),
            policy=policy,
            teacher=teacher,
            rollouts=rollouts,
            scored=_scored(config),
            log=RolloutLog(files, config.logger.show_samples_period, console, metrics, callbacks),
            held_out=len(self._validation),
            held_out_label=held_out_label(values),
            steps=steps,
            report=Report(metrics, console, policy, devices, policy_speed(config), system.take),
            signals=WeakSignals(values),
            mismatch_warning=config.logger.mismatch_warning,
            reward_weights={
                term.label: term.weight for one in source_configs(config).values() for term in terms_of(one.reward)
            },
            **of_engines,
        )

    def _order(self, source: str, state: Mapping[str, Any]) -> PromptOrder:
        """Return the order of a source's prompts in a state."""
        training, epochs = self._training[source], self._config.options(GRPOConfig).solved_cooldown_epochs
        cooldown = PromptCooldown(epochs, len(training.finite()), state.get("resting"), state["position"])
        return PromptOrder(training, cooldown, state)

    def _source(self, sampler: Sampler, generation: RecoveringGeneration, start: Start) -> RolloutSource:
        options = self._config.options(GRPOConfig)
        staleness = _staleness(self._config)
        # Keys may have changed since the checkpoint.
        changed = any(f"{line.partition(':')[0]}.".startswith(OF_ROLLOUTS) for line in start.changes)
        ahead = load_rollouts(start.folder) if staleness and start.folder and not changed else []
        if not ahead:
            # This run would sample the checkpoint's rollouts differently, so it samples their prompts again.
            sampler.order.give_back(start.rollouts.get("ahead", ()))
        if staleness is None:
            return OnPolicy(sampler, generation)
        stall_s = self._config.cluster.phase_timeout_s or math.inf
        saves = options.rollouts.checkpoint_inflight
        return AsyncRolloutSource(sampler, generation, staleness, start.steps, self._total, ahead, stall_s, saves)


def _scored(config: Config) -> list[Scored]:
    """Return the models that compute logprobs of a rollout before training."""
    own: list[Scored] = ["previous" if repeats_first_pass(config) else "later"] if previous_passes(config) else []
    return [*own, "reference"] if compares(config) else own


def _staleness(config: Config) -> Staleness | None:
    """Return the allowed staleness of rollouts; None for synchronous training."""
    rollouts = config.options(GRPOConfig).rollouts
    if rollouts.source == "on_policy":
        return None
    if rollouts.source == "one_step_off":
        return Staleness(max_age=1, in_flight=False)
    partial_ones = keeps_partial_rollouts(config)
    return Staleness(rollouts.max_trajectory_age_steps, rollouts.in_flight_weight_updates, partial_ones)


class SupervisedJob(_AlgorithmJob):
    """The `Job` of SFT, DPO, ORPO and KTO."""

    def __init__(self, config: Config, folder: Path, console: RunConsole, model_path: Path):
        super().__init__(config, folder, console, model_path)
        tokenizer = ChatTokenizer(model_path, config.policy.tokenizer.chat_template_kwargs)
        encoder = Encoder(tokenizer, config.policy.max_total_sequence_length, config.data.too_long)
        with console.busy("checking that every chat fits"):
            self._training = training_examples(config, encoder)
            check_texts(tokenizer, self._training.examples)
            self._validation = validation_examples(config, encoder, self._training.examples.finite())
            held_out = [(np.asarray(row.tokens).tobytes(), np.asarray(row.mask).tobytes()) for row in self._validation]
            self._data = data_identity(self._training.examples.finite(), held_out)
        self._limit_steps(self._training.steps_per_epoch)

    def launch(
        self, begun: StartingWorkers, start: Start, setup: Timer, budget: RestartBudget
    ) -> Callable[..., dict[str, int]]:
        """See `Job.launch`."""
        config, console = self._config, self._console
        with console.busy(f"starting {policy_ranks(config)} policy rank(s)"):
            policy = launch_policy(begun, start.policy, setup)
        return partial(self._train, policy, start)

    def _train(self, policy: RemotePolicy, start: Start, metrics: MetricsLog, callbacks: Callbacks) -> dict[str, int]:
        config, console = self._config, self._console
        options = config.options(SupervisedConfig)
        steps = self._steps(metrics, start, policy, lambda: [policy.group], callbacks)
        system = SystemUsage(lambda: policy.group.processes)
        Supervised(
            config=options,
            loss=make_loss(options),
            with_reference=compares(config),
            policy=policy,
            training=self._training,
            validation=self._validation,
            steps=steps,
            report=Report(metrics, console, policy, policy_ranks(config), policy_speed(config), system.take),
        ).run()
        return self._finish(policy, steps, [policy.group])
