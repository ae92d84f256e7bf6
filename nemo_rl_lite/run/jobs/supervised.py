"""A run of SFT, DPO, ORPO or KTO: its data, its policy, the loop."""

from pathlib import Path

from nemo_rl_lite.algorithms.loop import Report
from nemo_rl_lite.algorithms.supervised import Supervised, shown_limits, total_steps
from nemo_rl_lite.checkpoint.resume import Start
from nemo_rl_lite.cluster.system_usage import SystemUsage
from nemo_rl_lite.config.algorithms import compares
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sections.algorithm import SupervisedConfig
from nemo_rl_lite.config.sizes import policy_ranks
from nemo_rl_lite.data.examples import Encoder, training_examples, validation_examples
from nemo_rl_lite.data.odd_texts import check_texts
from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.losses.registry import make_loss
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog
from nemo_rl_lite.observability.start_up import report_start
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.rules.steps import check_total_steps
from nemo_rl_lite.run.jobs.steps import make_steps
from nemo_rl_lite.run.memory_plan import show_memory_plan
from nemo_rl_lite.run.speed import policy_speed
from nemo_rl_lite.run.workers.launch import launch_policy
from nemo_rl_lite.run.workers.reserve import Begun


class SupervisedJob:
    """Reads and checks everything when it is made; waits for its workers when it runs."""

    def __init__(self, config: Config, folder: Path, console: RunConsole, model_path: Path):
        self._config, self._folder, self._console, self._model_path = config, folder, console, model_path
        tokenizer = ChatTokenizer(model_path, config.policy.tokenizer.chat_template_kwargs)
        encoder = Encoder(tokenizer, config.policy.max_total_sequence_length, config.data.too_long)
        with console.busy("checking that every chat fits"):
            self._training = training_examples(config, encoder)
            check_texts(tokenizer, self._training.examples)
            options, per_epoch = config.options(SupervisedConfig), self._training.steps_per_epoch
            check_total_steps(config, total_steps(options, per_epoch))
            self._validation = validation_examples(config, encoder, self._training.examples.finite())
        if limits := shown_limits(options, per_epoch):
            console.say(limits)

    def run(self, metrics: MetricsLog, begun: Begun, start: Start, setup: Timer) -> dict[str, int]:
        """See `Job.run`; the memory is by the workers' names."""
        config, console = self._config, self._console
        with setup("memory_plan"):
            show_memory_plan(config, self._model_path, console, metrics, start.steps)
        with console.busy(f"starting {policy_ranks(config)} policy rank(s)"):
            policy = launch_policy(begun, start.policy, setup)
        report_start(setup, start.steps, metrics, console)
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
