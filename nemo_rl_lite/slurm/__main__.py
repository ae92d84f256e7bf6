"""`nrl-lite slurm [options] [group=file ...] [key.path=value ...]`: print or submit a training run as a Slurm job.

The configuration (cluster.num_nodes, cluster.gpus_per_node) is checked first; sbatch checks its own options. A job that
reaches its time limit or is preempted is requeued and resumes from its newest checkpoint. @FILE reads options from a
file, one per line.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from nemo_rl_lite.config.composition import notes_on_names
from nemo_rl_lite.config.experiments import as_words, expanded
from nemo_rl_lite.config.keys import RUN_FOLDER
from nemo_rl_lite.config.overrides import given_keys, named_run_folder
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, LauncherError, Violation, shown_as_message
from nemo_rl_lite.observability.environment import redact_command
from nemo_rl_lite.system.machine import local_path
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.validation.notes import notes, notes_elsewhere, show_notes

# Options of sbatch: `--NAME VALUE` becomes `#SBATCH --NAME=VALUE`.
_SBATCH = {
    "partition": ("-p", "partition"),
    "account": ("-A", "account"),
    "qos": ("-q", "quality of service"),
    "time": ("-t", "time limit, as minutes or [days-]hours:minutes:seconds; a longer run is requeued"),
    "cpus-per-task": ("-c", "CPUs per node, for a job that shares its nodes (default: whole nodes)"),
    "mem": ("", "memory per node, for a job that shares its nodes"),
    "gres": ("", "instead of --gpus-per-node=N, such as gpu:h100:8"),
}
_NAMES_GPUS = re.compile(r"--gpus|-G|--gres\b.*\bgpu")
# GPUs per node, as in `--gres=gpu:h100:8` or `--gpus-per-node=h100:8`; of the job, as in `-G8`.
_GPUS_OF_NODE = re.compile(r"(?:--gres\b.*?\bgpu|--gpus-per-node)(?:[:=\s]\w*[a-z]\w*)?[:=\s]\s*(\d+)\b")
_GPUS_OF_JOB = re.compile(r"(?:--gpus|-G)[=\s]?\s*(?:[\w-]+:)?(\d+)$")


class _Parser(argparse.ArgumentParser):
    """Parses lines of @FILE like a shell, with comments."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Exit status: 0 done, 1 sbatch failed, 2 bad arguments or configuration."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = _parser().parse_intermixed_args(as_words(words))
    with shown_as_message("nrl-lite slurm"):
        # Expand files now: they may change while the job is queued.
        given.overrides = expanded(given.overrides)
        config, run_folder = compose_config(given.overrides), named_run_folder(given.overrides)
        if given.log.endswith("/") or Path(given.log).is_dir():
            given.log = f"{given.log.rstrip('/')}/slurm-%j.out"
        if violations := [*_problems(given.log, run_folder), *_other_gpus(given, config)]:
            raise ConfigError(violations)
        own = _notes(config, run_folder, given.requeue)
        show_notes(
            [
                *notes_on_names(given.overrides),
                *notes(config, given_keys(given.overrides)),
                *notes_elsewhere(config),
                *own,
            ]
        )
        script = _script(given, config, run_folder, words)
        if hidden := [one.partition("=")[0] for one in given.overrides if _holds_secret(one)]:
            fix = f"read it from the environment: '{hidden[0]}=${{oc.env:NAME}}'"
            show_notes([f"{', '.join(hidden)}: the script has the value in clear text; {fix}"])
        # Slurm does not create this folder, and a job that cannot write its log fails silently.
        logs = Path(given.log).absolute().parent
        if given.submit or given.output:
            logs.mkdir(parents=True, exist_ok=True)
        elif not logs.is_dir():
            sys.stderr.write(f"note: create the folder of --log before sbatch: {logs}\n")
        if given.submit:
            sys.stdout.write(f"{_submit(script)}\n")
        elif given.output:
            given.output.write_text(script)
            if hidden:
                given.output.chmod(0o600)
            sys.stdout.write(f"submit it with: sbatch {shlex.quote(str(given.output))}\n")
        else:
            sys.stdout.write(script)


def _holds_secret(override: str) -> bool:
    """Return whether an override contains a secret, not only the name of its variable."""
    word = shlex.quote(override)
    return "${oc.env:" not in override and redact_command(word) != word


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nrl-lite slurm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help="as for train")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--submit", action="store_true", help="submit the job and print its id")
    what.add_argument("--output", type=local_path, metavar="FILE", help="write the script to a file")
    slurm = parser.add_argument_group("Slurm")
    slurm.add_argument("-J", "--job-name", metavar="NAME", help="name of the job (default: run_name)")
    for name, (short, help_text) in _SBATCH.items():
        slurm.add_argument(*filter(None, [short]), f"--{name}", metavar=name.upper()[:4], help=help_text)
    slurm.add_argument("--sbatch", action="append", default=[], metavar="=--OPTION", help="another #SBATCH option")
    slurm.add_argument("--srun", action="append", default=[], metavar="=--OPTION", help="another option of srun")
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
    nodes.add_argument("--setup", action="append", default=[], metavar="LINE", help="a shell line to run first")
    nodes.add_argument("--interface", metavar="NAME", help="network interface of Ray, gloo and NCCL's sockets")
    join = "seconds for all nodes to join (%(default)g)"
    nodes.add_argument("--join-timeout", type=float, default=600.0, metavar="S", help=join)
    nodes.add_argument("--python", help="Python on the nodes (default: this one; in a container: python)")
    nodes.add_argument("--container-image", metavar="IMAGE", help="an image that pyxis or Apptainer takes")
    nodes.add_argument("--container-mounts", metavar="A:B,...", help="host:inside, in addition to the working folder")
    nodes.add_argument("--container-runtime", choices=("pyxis", "apptainer"), default="pyxis", help="(%(default)s)")
    return parser


def _problems(log: str, run_folder: str | None) -> Iterator[Violation]:
    """Yield violations that sbatch accepts, but that lose the job's output or checkpoints."""
    if "%" in str(Path(log).parent) or "://" in log:
        rule = "must be a file in a folder that exists before the job"
        yield Violation("--log", log, rule, "--log=logs/%x-%j.out")
    if run_folder and "${" in run_folder:
        rule = "must stay the same when the job is requeued"
        yield Violation(RUN_FOLDER, run_folder, rule, f"{RUN_FOLDER}=outputs/my-run, or leave it to the job")


def _other_gpus(given: argparse.Namespace, config: Config) -> Iterator[Violation]:
    """Yield options whose number of GPUs differs from the configuration's: the job would fail after queueing."""
    nodes, gpus = config.cluster.num_nodes, config.cluster.gpus_per_node
    for option in [*([f"--gres={given.gres}"] if given.gres else []), *given.sbatch]:
        for pattern, wanted in ((_GPUS_OF_NODE, gpus), (_GPUS_OF_JOB, nodes * gpus)):
            if (found := pattern.match(option)) and int(found[1]) != wanted:
                rule = f"cluster.num_nodes = {nodes} and cluster.gpus_per_node = {gpus} need {wanted}"
                yield Violation(option.split("=")[0], option, rule, "the same number in both, or leave the option out")


def _notes(config: Config, run_folder: str | None, requeue: bool) -> Iterator[str]:
    from nemo_rl_lite.observability.summary import SUMMARY_FILE

    if not config.cluster.gpus_per_node:
        yield "cluster.gpus_per_node = 0: the job requests no GPU, and the run uses CPUs"
    if requeue and not config.checkpoint.save_period:
        yield "checkpoint.save_period = 0: a stopped job is not requeued, because nothing is saved"
    if run_folder and (Path(run_folder) / SUMMARY_FILE).exists():
        rule = "holds a finished run; the job resumes it only if algorithm.max_num_steps is larger"
        yield f"{RUN_FOLDER} = {run_folder} {rule}"


def _script(given: argparse.Namespace, config: Config, run_folder: str | None, words: Sequence[str]) -> str:
    """Return the script for sbatch. `words`: the command line, for a comment."""
    name, nodes, gpus = given.job_name or config.run_name, config.cluster.num_nodes, config.cluster.gpus_per_node
    values = {name: getattr(given, name.replace("-", "_")) for name in _SBATCH}
    options = [f"--{name}={shlex.quote(value)}" for name, value in values.items() if value is not None]
    if not values["cpus-per-task"] and not values["mem"]:
        # --mem=0 requests all memory of a node, and conflicts with memory per GPU or CPU.
        options += ["--exclusive", *([] if any("--mem-per-" in line for line in given.sbatch) else ["--mem=0"])]
    options += given.sbatch
    overrides = [shlex.quote(override) for override in given.overrides]
    folder = shlex.quote(run_folder or "")
    if run_folder is None:
        # The same folder when the job is requeued.
        folder = f'outputs/{_plain(name)}/slurm-"$SLURM_JOB_ID"'
        overrides.append('hydra.run.dir="$run_folder"')
    srun_options, in_container = _container(given, Path.cwd(), gpus > 0)
    node_options, exports = [f"--join-timeout-s={given.join_timeout:g}"], []
    if given.interface:
        node_options.append(f"--interface={given.interface}")
        interface = shlex.quote(given.interface)
        exports = [f"export NCCL_SOCKET_IFNAME={interface} GLOO_SOCKET_IFNAME={interface}"]
    own = [
        f"--job-name={_plain(name)}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={gpus}"] if gpus and not any(map(_NAMES_GPUS.match, options)) else []),
        f"--output={shlex.quote(given.log)}",
        "--open-mode=append",
        f"--signal=B:USR1@{given.stop_before}",
        "--requeue" if given.requeue else "--no-requeue",
    ]
    python = given.python or ("python" if given.container_image else sys.executable)
    lines = [
        "#!/usr/bin/env bash",
        f"# Generated by: {redact_command(shlex.join(['nrl-lite', 'slurm', *words]))}".replace("\n", " "),
        *(f"#SBATCH {option}" for option in [*own, *options]),
        # `module load` may read unset variables.
        *(["set -eo pipefail", *given.setup, "set -u"] if given.setup else ["set -euo pipefail"]),
        "",
        # Variables of slurm_job.sh, which follows.
        *exports,
        f"work_folder={shlex.quote(str(Path.cwd()))}",
        "# The same when the job is requeued, so that it resumes from its newest checkpoint.",
        f"run_folder={folder}",
        f"nodes={nodes}",
        f"requeue={str(given.requeue).lower()}",
        f"python={shlex.quote(python)}",
        f"node_options=({shlex.join(node_options)})",
        f"srun_options=({shlex.join([*given.srun, *srun_options])})",
        f"in_container=({shlex.join(in_container)})",
        'command=("$python" -m nemo_rl_lite.train',
        *(f"  {override}" for override in overrides),
        ")",
        "",
        files("nemo_rl_lite.slurm").joinpath("slurm_job.sh").read_text(),
    ]
    return "\n".join(lines)


def _container(given: argparse.Namespace, work_folder: Path, on_gpus: bool) -> tuple[list[str], list[str]]:
    """Return srun's options and the command prefix that run a task in the container."""
    if not given.container_image:
        return [], []
    mounts = given.container_mounts.split(",") if given.container_mounts else []
    if given.container_runtime == "pyxis":
        mounts = ",".join([f"{work_folder}:{work_folder}", *mounts])
        image = f"--container-image={given.container_image}"
        return [image, f"--container-mounts={mounts}", f"--container-workdir={work_folder}"], []
    binds = [word for mount in (str(work_folder), *mounts) for word in ("--bind", mount)]
    nvidia = ["--nv"] if on_gpus else []
    return [], ["apptainer", "exec", *nvidia, *binds, "--pwd", str(work_folder), given.container_image]


def _plain(name: str) -> str:
    """Replace characters that Hydra, Slurm or a shell would interpret."""
    return re.sub(r"[^\w.+-]", "-", name)


def _submit(script: str) -> str:
    """Submit the script; return the job's id. Raises LauncherError: sbatch is missing or fails."""
    if shutil.which("sbatch") is None:
        raise LauncherError(
            "sbatch is not on PATH: submit from a machine of the cluster, or omit --submit to print the script"
        )
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LauncherError(f"sbatch rejected the job: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


if __name__ == "__main__":
    main()
