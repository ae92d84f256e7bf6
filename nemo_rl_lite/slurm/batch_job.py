"""Writes a training run as a script for sbatch. Imports nothing heavy."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from nemo_rl_lite.slurm.gpus import asked_gpus

_BODY = "slurm_job.sh"


@dataclass(frozen=True)
class Container:
    """The container of the job's tasks: an image for pyxis or Apptainer, and `host:inside` mounts in addition to the
    working folder."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    mounts: Sequence[str]

    def srun_options(self, work_folder: Path) -> list[str]:
        if self.runtime != "pyxis":
            return []
        mounts = ",".join([f"{work_folder}:{work_folder}", *self.mounts])
        return [
            f"--container-image={self.image}",
            f"--container-mounts={mounts}",
            f"--container-workdir={work_folder}",
        ]

    def prefix(self, work_folder: Path, on_gpus: bool) -> list[str]:
        """The words before a task's command."""
        if self.runtime != "apptainer":
            return []
        mounts = [option for mount in (str(work_folder), *self.mounts) for option in ("--bind", mount)]
        return ["apptainer", "exec", *(["--nv"] if on_gpus else []), *mounts, "--pwd", str(work_folder), self.image]


@dataclass(frozen=True)
class BatchJob:
    """One run of `nemo_rl_lite.train` over `nodes` nodes, with `gpus_per_node` GPUs of each.

    `run_folder`: the one that the overrides name; None: a folder named after the job, which stays the same when the job
    is requeued. `sbatch_options`: further options of sbatch. `setup`: shell lines at the beginning.
    """

    name: str
    nodes: int
    gpus_per_node: int
    overrides: Sequence[str]
    run_folder: str | None
    work_folder: Path
    python: str
    log: str
    stop_before_s: int
    join_timeout_s: float
    requeue: bool
    sbatch_options: Sequence[str] = ()
    setup: Sequence[str] = ()
    srun_options: Sequence[str] = ()
    interface: str | None = None
    container: Container | None = None

    def script(self, made_by: Sequence[str]) -> str:
        """The whole file. `made_by`: the words of the command that makes it."""
        return "\n".join(
            [
                "#!/usr/bin/env bash",
                f"# Made by: {shlex.join(made_by)}".replace("\n", " "),
                *(f"#SBATCH {option}" for option in self._sbatch_options()),
                # `module load` reads unset variables, which `set -u` forbids.
                *(["set -eo pipefail", *self.setup, "set -u"] if self.setup else ["set -euo pipefail"]),
                "",
                *self._values(),
                "",
                files("nemo_rl_lite.slurm").joinpath(_BODY).read_text(),
            ]
        )

    def _sbatch_options(self) -> list[str]:
        named = any(option.startswith("--gpus") or asked_gpus(option) for option in self.sbatch_options)
        return [
            f"--job-name={plain(self.name)}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node and not named else []),
            f"--output={shlex.quote(self.log)}",
            "--open-mode=append",
            f"--signal=B:USR1@{self.stop_before_s}",
            "--requeue" if self.requeue else "--no-requeue",
            *self.sbatch_options,
        ]

    def _values(self) -> list[str]:
        """The variables that the script's second part, the same for all jobs, reads."""
        srun, prefix = [*self.srun_options], []
        if self.container:
            srun += self.container.srun_options(self.work_folder)
            prefix = self.container.prefix(self.work_folder, self.gpus_per_node > 0)
        node_options, interface = [f"--join-timeout-s={self.join_timeout_s:g}"], []
        if self.interface:
            node_options.append(f"--interface={self.interface}")
            name = shlex.quote(self.interface)
            interface = [f"export NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}"]
        overrides = [shlex.quote(override) for override in self.overrides]
        folder = shlex.quote(self.run_folder or "")
        if self.run_folder is None:
            folder = f'outputs/{plain(self.name)}/slurm-"$SLURM_JOB_ID"'
            overrides.append('hydra.run.dir="$run_folder"')
        return [
            *interface,
            f"work_folder={shlex.quote(str(self.work_folder))}",
            "# The same whenever the job is requeued, so that it resumes from its newest checkpoint.",
            f"run_folder={folder}",
            f"nodes={self.nodes}",
            f"requeue={str(self.requeue).lower()}",
            f"python={shlex.quote(self.python)}",
            f"node_options=({shlex.join(node_options)})",
            f"srun_options=({shlex.join(srun)})",
            f"in_container=({shlex.join(prefix)})",
            'command=("$python" -m nemo_rl_lite.train',
            *(f"  {override}" for override in overrides),
            ")",
        ]


def plain(name: str) -> str:
    """`name` without characters that Hydra, Slurm or a shell would interpret."""
    return re.sub(r"[^\w.+-]", "-", name)
