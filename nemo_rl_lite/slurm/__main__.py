"""`nrl-lite slurm [options] [group=file ...] [key.path=value ...]`: a training run as a Slurm job.

Prints a script for sbatch, or submits it. Nodes and GPUs are the configuration's (cluster.num_nodes,
cluster.gpus_per_node), which is checked first. A job that is stopped early, by its time limit or for another job, is
requeued and resumes from its newest checkpoint. Options may be kept in a file, one on a line, and given as @FILE.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_rl_lite.config.overrides import RUN_FOLDER, given_keys, named_run_folder
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, LauncherError, shown_as_message
from nemo_rl_lite.host.paths import local_path
from nemo_rl_lite.rules.compose import compose_config
from nemo_rl_lite.rules.notes import notes, notes_elsewhere, show
from nemo_rl_lite.slurm.batch_job import BatchJob, Container
from nemo_rl_lite.slurm.options import SBATCH, is_memory_share, option_problems

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
        config = compose_config(given.overrides)
        job = _job(given, config)
        show([*notes(config, given_keys(given.overrides)), *notes_elsewhere(config), *_of_the_job(job)])
        script = job.script(["nrl-lite", "slurm", *words])
        # Slurm does not make this folder, and a job that cannot write there ends without a message.
        logs = (job.work_folder / job.log).parent
        if given.submit or given.output:
            logs.mkdir(parents=True, exist_ok=True)
        elif not logs.is_dir():
            sys.stderr.write(f"note: make the folder of --log before sbatch, which does not: {logs}\n")
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
    what.add_argument("--output", type=local_path, metavar="FILE", help="write the script to a file")
    slurm = parser.add_argument_group("Slurm")
    slurm.add_argument("-J", "--job-name", metavar="NAME", help="(default: run_name)")
    for name, help_text in SBATCH.items():
        short = {"partition": "-p", "account": "-A", "qos": "-q", "time": "-t", "cpus-per-task": "-c"}.get(name)
        slurm.add_argument(*filter(None, [short]), f"--{name}", metavar=name.upper()[:4], help=help_text)
    slurm.add_argument("--sbatch", action="append", default=[], metavar="=--OPTION", help="any other #SBATCH line")
    slurm.add_argument("--srun", action="append", default=[], metavar="=--OPTION", help="any other option of srun")
    slurm.add_argument(
        "--log",
        type=os.path.expanduser,
        default="slurm-%j.out",
        help="the job's output, as sbatch's --output (%(default)s)",
    )
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
    run_folder = named_run_folder(given.overrides)
    if violations := list(option_problems(given, config, run_folder)):
        raise ConfigError(violations)
    own = {name: getattr(given, name.replace("-", "_")) for name in SBATCH}
    options = [f"--{name}={shlex.quote(value)}" for name, value in own.items() if value is not None]
    if not any(own[name] for name in _SHARED):
        # --mem=0 is all memory of a node, and excludes the memory of each GPU or CPU.
        options += ["--exclusive", *([] if any(map(is_memory_share, given.sbatch)) else ["--mem=0"])]
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


def _of_the_job(job: BatchJob) -> Iterator[str]:
    """That the job asks for no GPU, and that the run's folder holds a run that is done."""
    from nemo_rl_lite.observability.summary import SUMMARY_FILE

    if not job.gpus_per_node:
        yield "cluster.gpus_per_node = 0: the job asks for no GPU, and the run is on CPUs"
    if job.run_folder and (job.work_folder / job.run_folder / SUMMARY_FILE).exists():
        rule = "holds a run that is done; the job only resumes it where algorithm.max_num_steps is larger"
        yield f"{RUN_FOLDER} = {job.run_folder} {rule}"


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
