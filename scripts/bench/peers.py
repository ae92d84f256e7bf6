"""Compare the GRPO step of this project with its peers' at their fastest settings, in alternating runs on one GPU.

peers.py MODEL --times FOLDER [--rounds 2] [--steps 3] [--lora] [--searched NAME ...] [--packages PACKAGE=PATH:... ...]

The task is 64 x 8 responses of 512 tokens. There is no KL penalty and one optimizer step per rollout. The engine is on
the same GPU. All weights are trained, or adapters of rank 16. FOLDER has trl.times and verl.times, the searches of
`trl_step.py grpo` and `verl_step.py`. Each peer runs with its fastest setting; one without a file is left out. A round
runs this project and each peer once, and the record is written after each run. Warm-up steps do not count: the first of
a peer, the first two of this project. A peer of `--searched` does not run again: the steps of its search count, so
search on this machine. `--packages` gives the first folders of the import path for `trl` and `verl`.
verl 0.9.1 does not start next to TRL 1.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import record
from trl_step import PLAIN
from ways import COMPARISONS
from whole_runs import PHASES, STEPS_ALONE, Times, label, model_key, one_run, tiny_model, tried

OURS = "nemo_rl_lite"
RANK = "adapters, rank 16"
PEERS = {"TRL": ("trl", ["trl_step.py", "grpo"]), "verl": ("verl", ["verl_step.py"])}
Reps = dict[tuple[str, str], list[float]]
"""Repetitions by quantity and name of the system."""
UNITS = {"GPU in use after training": "GiB"}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="that count, of each run")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--searched", nargs="+", default=[], choices=PEERS, metavar="NAME")
    parser.add_argument("--packages", nargs="+", default=[], metavar="PACKAGE=PATH:...")
    given = parser.parse_args(arguments)
    searched = {name: json.loads(path.read_text()) for name in PEERS if (path := _file(given, name)).exists()}
    best = {name: fastest(one) for name, one in searched.items() if one["steps"]}
    runs: dict[str, Callable[[], dict[str, list[float]]]] = {OURS: lambda: _ours(given)}
    runs |= {name: lambda name=name: _peer(given, name, best[name]) for name in best if name not in given.searched}
    reps: Reps = {
        (quantity, name): found
        for name in given.searched
        if name in best
        for quantity, found in searched[name]["steps"][label(best[name])].items()
    }
    failures: list[str] = []
    for _ in range(given.rounds):
        for name, run in runs.items():
            try:
                measured = run()
            except (SystemExit, subprocess.CalledProcessError) as error:
                failures.append(f"{name}: {error}"[-300:])
                continue
            for quantity, found in measured.items():
                reps.setdefault((quantity, name), []).extend(found)
            print(name, {quantity: round(statistics.median(found), 3) for quantity, found in measured.items()})
            print(_write(given, reps, searched, best, failures), flush=True)


def fastest(searched: dict[str, Any]) -> dict[str, Any]:
    """Return the setting with the shortest median step of a file of `Times`."""
    medians = {name: statistics.median(found["step time"]) for name, found in searched["steps"].items()}
    return searched["settings"][min(medians, key=lambda name: medians[name])]


def _file(given: argparse.Namespace, name: str) -> Path:
    return given.times / f"{PEERS[name][0]}.times"


def _ours(given: argparse.Namespace) -> dict[str, list[float]]:
    comparison, way = COMPARISONS["lora" if given.lora else "speed"], RANK if given.lora else "fast scheduler"
    warm = 2
    share = "generation.vllm_cfg.gpu_memory_utilization=auto"
    keys = [*comparison.task, *STEPS_ALONE, *comparison.ways[way], share, model_key(given.model)]
    steps, _ = one_run([*keys, f"algorithm.max_num_steps={warm + given.steps}"], warm)
    return {name: [step[metric] / by for step in steps] for name, _, metric, by in PHASES if metric in steps[0]}


def _peer(given: argparse.Namespace, name: str, setting: dict[str, Any]) -> dict[str, list[float]]:
    """Run a peer's script. Raises CalledProcessError: it took no step."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        script, *part = PEERS[name][1]
        command = [
            sys.executable,
            str(Path(__file__).with_name(script)),
            *part,
            str(given.model),
            "--times",
            str(times),
        ]
        command += ["--settings", json.dumps(setting), "--steps", str(given.steps)]
        command += ["--lora", "16"] if given.lora else []
        packages = dict(one.split("=") for one in given.packages).get(PEERS[name][0])
        paths = ":".join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
        status = _run(command, paths)
        found = json.loads(times.read_text()) if times.exists() else {"steps": {}, "skipped": {}}
        if not found["steps"]:
            raise SystemExit(f"status {status}, {found['skipped']}")
        return found["steps"][label(setting)]


def _run(command: list[str], paths: str) -> int:
    """Run a peer's script with this PYTHONPATH; return its exit status."""
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, stdout=sys.stderr).returncode


def _write(
    given: argparse.Namespace, reps: Reps, searched: dict[str, Any], best: dict[str, Any], failures: list[str]
) -> Path:
    """Write the record: the repetitions, the settings, and the search for them."""
    rows = [
        record.result(quantity, _row(name, searched), UNITS.get(quantity, "s"), found)
        for (quantity, name), found in reps.items()
    ]
    more = {
        "settings": best,
        "search": {name: one["steps"] for name, one in searched.items()},
        "skipped": {name: one["skipped"] for name, one in searched.items()},
        "versions of peers": {name: one.get("versions", {}) for name, one in searched.items()},
        "steps of the search count": given.searched,
        "failures": failures,
    }
    bench = "peers-lora-1.7b" if given.lora else "peers-1.7b"
    return record.write(bench, rows, [], "; ".join(_row(name, searched) for name in [OURS, *best]), more)


def _row(name: str, searched: dict[str, Any]) -> str:
    """Return a name, that of a peer with the version that was searched."""
    found = searched[name].get("versions", {}).get(PEERS[name][0]) if name in searched else None
    return f"{name} {found}" if found else name


def trial() -> None:
    """Take the steps of TRL with the setting of a search, in this process, and ours from a known run."""
    own = Path(os.environ["NRL_BENCH_OUT"]) / "times"
    own.mkdir(exist_ok=True)
    times = Times(own / "trl.times")
    for size, seconds in ((1, 2.0), (128, 1.0)):
        for _ in range(2):
            times.add(PLAIN | {"micro_batch": size}, {"step time": seconds})
    shutil.copytree(tiny_model(), own / "model", dirs_exist_ok=True)
    shape = json.loads((own / "model" / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (own / "model" / "config.json").write_text(json.dumps(shape))
    with tried(), patch.dict(os.environ), patch.object(sys.modules[__name__], "_run", _run_here):
        main([str(own / "model"), "--times", str(own), "--rounds", "1", "--steps", "1"])


def _run_here(command: list[str], _: str) -> int:
    """Do what a peer's script would do in a separate process, which imports for many seconds."""
    importlib.import_module(Path(command[1]).stem).main(command[2:])
    return 0


if __name__ == "__main__":
    record.start(main, trial)
