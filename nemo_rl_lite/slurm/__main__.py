"""`nrl-lite slurm [options] [group=file ...] [key.path=value ...]`: a training run as a Slurm job.

Prints a script for sbatch, or submits it. Nodes and GPUs are the configuration's (cluster.num_nodes,
cluster.gpus_per_node), which is checked first. A job that is stopped early, by its time limit or for another job, is
requeued and resumes from its newest checkpoint. Options may be kept in a file, one on a line, and given as @FILE.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_lite.config.overrides import RUN_FOLDER, named_run_folder
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, LauncherError, Violation, shown_as_message
from nemo_rl_lite.rules.compose import compose_command
from nemo_rl_lite.slurm.batch_job import BatchJob, Container

# Options of sbatch, and their help; `--NAME VALUE` becomes `#SBATCH --NAME=VALUE`.
_SBATCH = {
    "partition": "where to run",
    "account": "on whose account",
    "qos": "quality of service",
    "time": "limit, as minutes or [days-]hours:minutes:seconds; a longer run is requeued",
    "cpus-per-task": "CPUs of each node, where the job shares its nodes (default: whole nodes)",
    "mem": "memory of each node, where the job shares its nodes",
    "gres": "in place of --gpus-per-node=N, for instance gpu:h100:8",
}
_SHARED = ("cpus-per-task", "mem")


class _Parser(argparse.ArgumentParser):
    """Parses a line of @FILE as a shell does, with comments."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit status: 0 done, 1 sbatch failed, 2 bad arguments or configuration."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    given = parser.parse_intermixed_args(words)
    with shown_as_message("nrl-lite slurm"):
        job = _job(given, compose_command(given.overrides))
        script = job.script(["nrl-lite", "slurm", *words])
        if given.submit or given.output:
            # Slurm does not make this folder, and a job that cannot write there ends without a message.
            (job.work_folder / job.log).parent.mkdir(parents=True, exist_ok=True)
        if given.submit:
            sys.stdout.write(f"{_submit(script)}\n")
        elif given.output:
            given.output.write_text(script)
            sys.stdout.write(f"submit it with: sbatch {shlex.quote(str(given.output))}\n")
        else:
            sys.stdout.write(script)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nrl-lite slurm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help="as of `nrl-lite train`")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--submit", action="store_true", help="submit the job and print its id")
    what.add_argument("--output", type=Path, metavar="FILE", help="write the script to a file")
    slurm = parser.add_argument_group("Slurm")
    slurm.add_argument("-J", "--job-name", metavar="NAME", help="(default: run_name)")
    for name, help_text in _SBATCH.items():
        short = {"partition": "-p", "account": "-A", "qos": "-q", "time": "-t", "cpus-per-task": "-c"}.get(name)
        slurm.add_argument(*filter(None, [short]), f"--{name}", metavar=name.upper()[:4], help=help_text)
    slurm.add_argument("--sbatch", action="append", default=[], metavar="=--OPTION", help="any other #SBATCH line")
    slurm.add_argument("--srun", action="append", default=[], metavar="=--OPTION", help="any other option of srun")
    slurm.add_argument("--log", default="slurm-%j.out", help="the job's output, as sbatch's --output (%(default)s)")
    stop = "seconds before the limit at which the run saves and stops; a step and a save must fit (%(default)s)"
    slurm.add_argument("--stop-before", type=int, default=120, metavar="S", help=stop)
    slurm.add_argument("--no-requeue", dest="requeue", action="store_false", help="do not requeue a stopped job")
    nodes = parser.add_argument_group("on the nodes")
    nodes.add_argument("--setup", action="append", default=[], metavar="LINE", help="a shell line to begin with")
    nodes.add_argument("--interface", metavar="NAME", help="network interface of Ray, gloo and NCCL's sockets")
    nodes.add_argument("--join-timeout", type=float, default=600.0, metavar="S", help="for all nodes (%(default)g s)")
    nodes.add_argument("--python", help="(default: this one; in a container: python)")
    nodes.add_argument("--container-image", metavar="IMAGE", help="an image that pyxis or Apptainer takes")
    nodes.add_argument("--container-mounts", metavar="A:B,...", help="host:inside, in addition to the working folder")
    nodes.add_argument("--container-runtime", choices=("pyxis", "apptainer"), default="pyxis", help="(%(default)s)")
    return parser


def _job(given: argparse.Namespace, config: Config) -> BatchJob:
    """Make the job. Raises ConfigError: the options contradict the configuration or each other."""
    violations = []
    if given.requeue and not config.checkpoint.save_period:
        rule = "a requeued job would have no checkpoint to resume from"
        violations.append(Violation("checkpoint.save_period", 0, rule, "checkpoint.save_period=10, or --no-requeue"))
    if given.container_mounts and not given.container_image:
        violations.append(
            Violation("--container-mounts", given.container_mounts, "needs a container", "--container-image=...")
        )
    if given.stop_before <= 0:
        violations.append(Violation("--stop-before", given.stop_before, "must be greater than 0", "--stop-before=120"))
    limit = _limit_s(given.time) if given.time else None
    if limit is not None and given.stop_before >= limit:
        rule, fix = f"leaves nothing of the time limit, {given.time}", "a smaller --stop-before, or a longer --time"
        violations.append(Violation("--stop-before", given.stop_before, rule, fix))
    if given.join_timeout <= 0:
        violations.append(
            Violation("--join-timeout", given.join_timeout, "must be greater than 0", "--join-timeout=600")
        )
    if given.container_runtime != "pyxis" and not given.container_image:
        rule = "needs a container"
        violations.append(Violation("--container-runtime", given.container_runtime, rule, "--container-image=..."))
    for name in _SBATCH:
        if getattr(given, name.replace("-", "_")) == "":
            violations.append(Violation(f"--{name}", "", "is empty", f"a value, or no --{name}"))
    for name in ("sbatch", "srun", "setup", "log"):
        for line in [given.log] if name == "log" else getattr(given, name):
            if "\n" in line or (name in ("sbatch", "srun") and not line.startswith("-")):
                example = f"--{name}=--constraint=h100" if name != "setup" else "--setup='module load cuda'"
                violations.append(
                    Violation(f"--{name}", line, "must be one line, and for sbatch and srun an option", example)
                )
    if "%" in str(Path(given.log).parent):
        rule = "has a pattern in its folder, which must exist before the job"
        violations.append(Violation("--log", given.log, rule, "--log=logs/%x-%j.out"))
    run_folder = named_run_folder(given.overrides)
    if run_folder and "${" in run_folder:
        rule = "must stay the same when the job is requeued"
        fix = f"{RUN_FOLDER}=outputs/my-run, or leave it to the job"
        violations.append(Violation(RUN_FOLDER, run_folder, rule, fix))
    if violations:
        raise ConfigError(violations)
    own = {name: getattr(given, name.replace("-", "_")) for name in _SBATCH}
    options = [f"--{name}={shlex.quote(value)}" for name, value in own.items() if value is not None]
    if not any(own[name] for name in _SHARED):
        options += ["--exclusive", "--mem=0"]
    image = given.container_image
    mounts = given.container_mounts.split(",") if given.container_mounts else []
    return BatchJob(
        name=given.job_name or config.run_name,
        nodes=config.cluster.num_nodes,
        gpus_per_node=config.cluster.gpus_per_node,
        overrides=given.overrides,
        run_folder=run_folder,
        work_folder=Path.cwd(),
        python=given.python or ("python" if image else sys.executable),
        log=given.log,
        stop_before_s=given.stop_before,
        join_timeout_s=given.join_timeout,
        requeue=given.requeue,
        sbatch_options=[*options, *given.sbatch],
        setup=given.setup,
        srun_options=given.srun,
        interface=given.interface,
        container=Container(given.container_runtime, image, mounts) if image else None,
    )


def _limit_s(text: str) -> int | None:
    """Seconds of a time limit as sbatch takes it: minutes[:seconds], hours:minutes:seconds, or days-hours[:minutes
    [:seconds]]. None for anything else, such as UNLIMITED, which sbatch judges."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return None
    days, *parts = (int(part) if part else None for part in found.groups())
    numbers = [part for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return (days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _submit(script: str) -> str:
    """Submit the script and return the job's id. Raises LauncherError: sbatch is missing, or refuses."""
    if shutil.which("sbatch") is None:
        raise LauncherError(
            "sbatch is not on PATH: submit from a machine of the cluster, or print the script (no --submit)"
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode:
        raise LauncherError(f"sbatch refuses the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


if __name__ == "__main__":
    main()
