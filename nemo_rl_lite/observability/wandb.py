"""Sends metrics, samples and charts to W&B; offline, `wandb sync RUN/wandb/offline-run-*` sends them later."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.schema import WandbConfig
from nemo_rl_lite.errors import LauncherError
from nemo_rl_lite.observability.environment import for_trackers
from nemo_rl_lite.observability.sink import Chart, Metrics, Sample, Sink

RUN_ID_FILE = "wandb-run-id.txt"
# Prefixes of metrics; each is a section of the dashboard, drawn over the run's steps.
SECTIONS = (
    "train",
    "timing/train",
    "timing/validation",
    "timing/setup",
    "timing/rollout",
    "timing/replicas",
    "performance",
    "refit",
    "offload",
    "memory",
    "validation",
    "ray",
)
# The aggregate of these metrics in W&B's table of runs.
BEST = {"validation/accuracy": "max", "validation/val_loss": "min", "train/reward": "max", "train/loss": "min"}


class WeightsAndBiases(Sink):
    """One W&B run. Source code, the command line and secrets of the configuration are not uploaded."""

    def __init__(self, config: WandbConfig, folder: Path, whole_config: Mapping[str, Any]):
        import wandb

        self._is_done = False
        try:
            self._run = self._start(config, folder, whole_config)
        except wandb.errors.Error as error:
            raise LauncherError(f"W&B could not start: {error}. Offline works: logger.wandb.mode=offline") from error
        self._run.define_metric("step", hidden=True)
        for section in SECTIONS:
            self._run.define_metric(f"{section}/*", step_metric="step")
        for name, best in BEST.items():
            self._run.define_metric(name, step_metric="step", summary=f"{best},last")

    @staticmethod
    def _start(config: WandbConfig, folder: Path, whole_config: Mapping[str, Any]) -> Any:
        import wandb

        kept = folder / RUN_ID_FILE
        if not kept.exists():
            kept.write_text(secrets.token_hex(4) + "\n")
        return wandb.init(
            # A resumed run continues the same W&B run.
            id=kept.read_text().strip(),
            resume="allow" if config.mode == "online" else None,
            project=config.project,
            name=config.name,
            entity=config.entity,
            mode=config.mode,
            dir=folder,
            config=for_trackers(folder, whole_config),
            save_code=False,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_job_creation=True, x_disable_meta=True
            ),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        rows: Any = [[step, sample.prompt, sample.response, sample.reward] for sample in samples]
        table = wandb.Table(columns=["step", "prompt", "response", "reward"], data=rows)
        self._run.log({"step": step, "rollouts": table})

    def log_summary(self, values: Metrics, charts: Sequence[Chart]) -> None:
        import wandb

        for chart in charts:
            table = wandb.Table(columns=list(chart.columns), data=[list(row) for row in chart.rows])
            drawn = wandb.plot.bar(table, chart.columns[0], chart.columns[-1], title=chart.title)
            self._run.log({f"charts/{chart.name}": drawn})
        self._run.summary.update({f"summary/{name}": value for name, value in values.items()})
        self._is_done = True

    def close(self) -> None:
        import wandb

        # Without an exit code W&B shows a failed or stopped run as finished.
        self._run.finish(exit_code=0 if self._is_done else 1)
        if wandb.run is None:
            # End W&B's own process and threads, which would stay for as long as this process.
            wandb.teardown()
