"""What is wrong with the options of `nrl-lite slurm`, before anything is written or submitted."""

import argparse
import math
import re
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_lite.config.overrides import RUN_FOLDER
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation
from nemo_rl_lite.host.stopping import seconds
from nemo_rl_lite.slurm.gpus import gpu_problems

# Options of sbatch, and their help; `--NAME VALUE` becomes `#SBATCH --NAME=VALUE`.
SBATCH = {
    "partition": "where to run",
    "account": "on whose account",
    "qos": "quality of service",
    "time": "limit, as minutes or [days-]hours:minutes:seconds; a longer run is requeued",
    "cpus-per-task": "CPUs of each node, where the job shares its nodes (default: whole nodes)",
    "mem": "memory of each node, where the job shares its nodes",
    "gres": "in place of --gpus-per-node=N, for instance gpu:h100:8",
}
# What the script itself tells sbatch and srun, and what decides it here.
_WRITTEN = {
    "job-name": "--job-name",
    "nodes": "cluster.num_nodes",
    "ntasks": "one task on each node",
    "ntasks-per-node": "one task on each node",
    "gpus-per-node": "cluster.gpus_per_node, or --gres=gpu:h100:8 for a type",
    "output": "--log",
    "open-mode": "a log that is appended to",
    "signal": "--stop-before",
    "requeue": "no --no-requeue",
    "no-requeue": "--no-requeue",
    # The limit of time and the share of a node enter the script elsewhere, too.
    **{name: f"--{name}" for name in ("time", "cpus-per-task", "mem")},
}
_SHORT = {"J": "job-name", "N": "nodes", "n": "ntasks", "o": "output", "t": "time", "c": "cpus-per-task"}
_SHORT |= {"p": "partition", "A": "account", "q": "qos", "a": "array"}
_OF_SRUN = ("nodes", "ntasks", "ntasks-per-node")
_ENDLESS = ("UNLIMITED", "INFINITE")
# Options that take a text. An unset variable of a shell would be an empty one.
_TEXTS = (*SBATCH, "job-name", "log", "interface", "python", "container-image", "container-mounts")


def option_problems(given: argparse.Namespace, config: Config, run_folder: str | None) -> Iterator[Violation]:
    """Yield what contradicts the configuration or another option. `run_folder`: the one that the overrides name."""
    if given.requeue and not config.checkpoint.save_period:
        rule = "a requeued job would have no checkpoint to resume from"
        yield Violation("checkpoint.save_period", 0, rule, "checkpoint.save_period=10, or --no-requeue")
    if run_folder and "${" in run_folder:
        rule = "must stay the same when the job is requeued"
        yield Violation(RUN_FOLDER, run_folder, rule, f"{RUN_FOLDER}=outputs/my-run, or leave it to the job")
    yield from _times(given, config)
    yield from _cpus(given, config)
    yield from gpu_problems(given.gres, given.sbatch, config)
    yield from _texts(given)
    yield from _lines(given)
    if given.container_image is None:
        rule, fix = "needs a container", "--container-image=..."
        if given.container_mounts:
            yield Violation("--container-mounts", given.container_mounts, rule, fix)
        if given.container_runtime != "pyxis":
            yield Violation("--container-runtime", given.container_runtime, rule, fix)


def _times(given: argparse.Namespace, config: Config) -> Iterator[Violation]:
    if given.stop_before <= 0:
        yield Violation("--stop-before", given.stop_before, "must be greater than 0", "--stop-before=120")
    limit = _limit_s(given.time) if given.time else None
    if given.time and limit is None and given.time.upper() not in _ENDLESS:
        rule = "is no limit of Slurm, which takes minutes or [days-]hours:minutes:seconds"
        yield Violation("--time", given.time, rule, "--time=4:00:00 for four hours")
    if limit is not None and given.stop_before >= limit:
        rule, fix = f"leaves nothing of the time limit, {given.time}", "a smaller --stop-before, or a longer --time"
        yield Violation("--stop-before", given.stop_before, rule, fix)
    key, save_by = "checkpoint.must_save_by", config.checkpoint.must_save_by
    if limit is not None and (seconds(save_by) or 0) >= limit:
        fix = f"leave it out, because --stop-before saves, or a smaller {key}"
        yield Violation(key, save_by, f"is not before the time limit, {given.time}", fix)
    if not 0 < given.join_timeout < math.inf:
        rule = "must be a number greater than 0"
        yield Violation("--join-timeout", given.join_timeout, rule, "--join-timeout=600")


def _cpus(given: argparse.Namespace, config: Config) -> Iterator[Violation]:
    key, threads, asked = "cluster.threads_per_worker", config.cluster.threads_per_worker, given.cpus_per_task or ""
    # Engines on the policy's devices take turns with it.
    workers = config.cluster.gpus_per_node or config.cluster.cpu_ranks // config.cluster.num_nodes
    if threads is not None and asked.isdecimal() and threads * workers > int(asked):
        rule = f"needs {threads * workers} CPUs of a node, for {workers} workers, and --cpus-per-task asks for {asked}"
        yield Violation(key, threads, rule, f"{key}=null, or --cpus-per-task={threads * workers}")


def _texts(given: argparse.Namespace) -> Iterator[Violation]:
    for name in _TEXTS:
        if getattr(given, name.replace("-", "_")) == "":
            yield Violation(f"--{name}", "", "is empty", f"a value, or no --{name}")
    if given.mem is not None and given.mem.isdecimal() and int(given.mem):
        rule = "has no unit, and Slurm would take it for MiB"
        yield Violation("--mem", given.mem, rule, f"--mem={given.mem}G, or --mem={given.mem}M")
    if given.interface and re.fullmatch(r"[\d.:]+", given.interface):
        rule = "is an address, and the name of a network interface is needed"
        yield Violation("--interface", given.interface, rule, "--interface=ib0, as `ip addr` lists them")
    if given.output and "%" in given.output.name:
        rule = "is the file that the script is written to, and has a pattern of Slurm"
        yield Violation("--output", str(given.output), rule, f"--log={given.output} for the job's output")
    if "://" in given.log or given.log.endswith("/") or Path(given.log).is_dir():
        rule, fix = "is no file of the job's machine", f"--log={given.log.rstrip('/')}/%x-%j.out"
        yield Violation("--log", given.log, rule, "--log=logs/%x-%j.out" if "://" in given.log else fix)
    if "%" in str(Path(given.log).parent):
        rule = "has a pattern in its folder, which must exist before the job"
        yield Violation("--log", given.log, rule, "--log=logs/%x-%j.out")


def _lines(given: argparse.Namespace) -> Iterator[Violation]:
    lines = [(name, line) for name in ("sbatch", "srun", "setup") for line in getattr(given, name)]
    # Options that the command gives the script, which sbatch would take from its last line.
    own = {name: f"--{name}" for name in SBATCH if getattr(given, name.replace("-", "_"))}
    written = _WRITTEN | own
    for name, line in [*lines, ("log", given.log)]:
        of_slurm = name in ("sbatch", "srun")
        if "\n" in line or (of_slurm and not line.startswith("-")) or (name == "setup" and not line.strip()):
            example = f"--{name}=--constraint=h100" if name != "setup" else "--setup='module load cuda'"
            yield Violation(f"--{name}", line, "must be one line, and for sbatch and srun an option", example)
        elif name == "sbatch" and is_memory_share(line) and given.mem is not None:
            rule = f"excludes --mem={given.mem}, which the command gives as well"
            yield Violation("--sbatch", line, rule, "one of the two")
        elif name == "sbatch" and _option(line) == "array":
            rule = "would run the same command several times, and all of its tasks in one folder"
            fix = "nrl-lite train -m for a sweep, or a submission with its own hydra.run.dir for each run"
            yield Violation("--sbatch", line, rule, fix)
        elif of_slurm and (option := _option(line)) in written and (name == "sbatch" or option in _OF_SRUN):
            rule = f"contradicts the script, which gives --{option} itself"
            yield Violation(f"--{name}", line, rule, f"leave it out; it is decided by {written[option]}")


def is_memory_share(line: str) -> bool:
    """Whether a line asks for memory for each GPU or CPU."""
    return _option(line) in ("mem-per-gpu", "mem-per-cpu")


def _option(line: str) -> str:
    """The long name of the option that a line gives; empty for a short one that the script never gives."""
    return re.split("[= ]", line[2:])[0] if line.startswith("--") else _SHORT.get(line[1:2], "")


def _limit_s(text: str) -> int | None:
    """Seconds of a time limit as sbatch takes it: minutes[:seconds], hours:minutes:seconds, or days-hours[:minutes
    [:seconds]]. None for anything else, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        return None
    days, *parts = (int(part) if part else None for part in found.groups())
    numbers = [part for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return (days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))
