"""Build the checkpoints, the stopping rules and the profiler of a run from its configuration."""

from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.algorithms.loop import Steps
from nemo_rl_lite.checkpoint.checkpoints import Checkpoints, SaveRollouts, save_none
from nemo_rl_lite.checkpoint.resume import Start, checkpoint_store
from nemo_rl_lite.cluster.profiler import StepProfiler
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.host.stopping import Stopping, seconds
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.metrics_log import MetricsLog
from nemo_rl_lite.observability.redaction import described
from nemo_rl_lite.observability.timer import seconds_since_start
from nemo_rl_lite.policy.interface import Policy


def make_steps(
    config: Config,
    folder: Path,
    start: Start,
    policy: Policy,
    metrics: MetricsLog,
    console: RunConsole,
    groups: Sequence[WorkerGroup],
    rollouts: SaveRollouts = save_none,
) -> Steps:
    """Make the steps of a run in `folder` after `start`. `groups`: all workers, for the profiler. `rollouts` saves
    what the source of rollouts has in a checkpoint."""
    options = config.checkpoint
    checkpoints = Checkpoints(
        checkpoint_store(config, folder),
        policy,
        options.save_period,
        options.async_save,
        {"config": described(config)},
        console.say,
        saved=start.steps or None,
        rollouts=rollouts,
    )
    stopping = Stopping(seconds(options.must_save_by), seconds_since_start)
    around = StepProfiler(config.profile, folder, groups).around
    return Steps(start.steps, checkpoints, stopping, metrics, config.policy.max_skipped_steps, around)
