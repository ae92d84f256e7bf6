"""The GPUs that options of sbatch ask for."""

import re
from collections.abc import Iterator, Sequence

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import Violation

_OF_A_JOB, _OF_A_NODE = ("--gpus", "-G"), ("--gres", "--gpus-per-task")


def asked_gpus(line: str) -> tuple[int, bool] | None:
    """The number of GPUs that an option asks for, as `--gres=gpu:h100:8`, `--gpus 8` or `-G8`, and whether that is the
    number of the whole job, not of a node (or of its one task); None where it asks for none, or not with a number."""
    found = re.fullmatch(r"(--[a-z-]+|-G)[= ]*(.+)", line.strip())
    if found is None or found[1] not in (*_OF_A_JOB, *_OF_A_NODE):
        return None
    kinds = [kind.split(":") for kind in found[2].strip("'\"").split(",")]
    if found[1] == "--gres":
        # gpu, gpu:8, gpu:h100 and gpu:h100:8; a list may have other resources, too.
        kinds = [kind[1:] or ["1"] for kind in kinds if kind[0] == "gpu"]
        kinds = [kind if kind[-1].isdecimal() else [*kind, "1"] for kind in kinds]
    if not kinds or not all(kind[-1].isdecimal() for kind in kinds):
        return None
    return sum(int(kind[-1]) for kind in kinds), found[1] in _OF_A_JOB


def gpu_problems(gres: str | None, lines: Sequence[str], config: Config) -> Iterator[Violation]:
    """Yield where the option --gres, or a line of --sbatch, asks for other GPUs than the configuration."""
    nodes, each = config.cluster.num_nodes, config.cluster.gpus_per_node
    given = [("--gres", f"--gres={gres}")] if gres else []
    for name, line in [*given, *(("--sbatch", line) for line in lines)]:
        asked = asked_gpus(line)
        if asked is None:
            continue
        count, of_the_job = asked
        expected, what = (nodes * each, f"on {nodes} node(s)") if of_the_job else (each, "of each node")
        if count != expected:
            needs = f"cluster.gpus_per_node = {each} needs {expected} {what}" if each else "the run is on CPUs"
            then = f"cluster.gpus_per_node={count // nodes if of_the_job else count}"
            fix = f"ask for {expected}, or {then}" if each else f"leave it out, or {then}"
            yield Violation(name, line, f"asks for {count} GPUs, and {needs}", fix)
