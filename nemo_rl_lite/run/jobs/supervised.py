"""A run of SFT or DPO: its data, its policy, the loop."""

from dataclasses import replace
from pathlib import Path

from nemo_rl_lite.algorithms.report import Report
from nemo_rl_lite.algorithms.supervised import Supervised, shown_limits, total_steps
from nemo_rl_lite.checkpoint.resume import Start
from nemo_rl_lite.cluster.system_usage import SystemUsage
from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.schema import Config, SupervisedConfig
from nemo_rl_lite.config.sizes import policy_ranks
from nemo_rl_lite.data.examples import Encoder, training_examples, validation_examples
from nemo_rl_lite.data.odd_texts import check_texts
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.losses.registry import make_loss
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog, under
from nemo_rl_lite.rules.steps import check_total_steps
from nemo_rl_lite.run.jobs.steps import make_steps
from nemo_rl_lite.run.memory_plan import settled, show_memory_plan
from nemo_rl_lite.run.model import starting_model
from nemo_rl_lite.run.speed import policy_speed
from nemo_rl_lite.run.workers.launch import Reserved, launch_policy


class SupervisedJob:
    """Reads and checks everything when it is made; starts workers when it runs."""

    def __init__(self, config: Config, folder: Path, console: RunConsole):
        self._config, self._folder, self._console = config, folder, console
        self._model_path = starting_model(config, console)
        tokenizer = ChatTokenizer(self._model_path)
        encoder = Encoder(tokenizer, config.policy.max_total_sequence_length, config.data.too_long)
        with console.busy("checking that every chat fits"):
            self._training = training_examples(config, encoder)
            check_texts(tokenizer, self._training.examples)
            options, per_epoch = config.options(SupervisedConfig), self._training.steps_per_epoch
            check_total_steps(config, total_steps(options, per_epoch))
            self._validation = validation_examples(config, encoder, self._training.examples.finite())
        if limits := shown_limits(options, per_epoch):
            console.say(limits)

    def run(self, metrics: MetricsLog, reserved: Reserved, start: Start) -> dict[str, int]:
        """Train in the reserved processes from `start` on; returns the workers' peak memory in bytes, by name."""
        console = self._console
        config = self._config = settled(self._config, self._model_path, console)
        reserved = replace(reserved, config=config)
        show_memory_plan(config, self._model_path, console, metrics, start.steps)
        with console.busy(f"starting {policy_ranks(config)} policy rank(s)"):
            policy = launch_policy(reserved, self._model_path, start.policy)
        metrics.log(start.steps, under("timing/setup", reserved.setup_seconds()))
        options = config.options(SupervisedConfig)
        steps = make_steps(config, self._folder, start, policy, metrics, console, [policy.group])
        system = SystemUsage(policy.group.processes)
        Supervised(
            config=options,
            loss=make_loss(options),
            with_reference=compares(config),
            shown=("accuracy", "rewards_margin_mean"),
            policy=policy,
            training=self._training,
            validation=self._validation,
            steps=steps,
            report=Report(metrics, console, policy, policy_ranks(config), policy_speed(config), system.take),
        ).run()
        policy.release_host_memory()
        if config.checkpoint.export_hf_at_end:
            policy.export_hf(str(self._folder / "hf"))
        # A failed checkpoint is an error only now that the trained weights are exported.
        steps.checkpoints.require()
        return {f"{policy.group.name}-{rank}": size for rank, size in enumerate(policy.group.peak_memory())}
