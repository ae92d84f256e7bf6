"""Follow docs/tutorial.md: minutes of each command, the reward's rise, accuracy and peak memory.

tutorial.py [MODEL]    MODEL: the folder of SmolLM2-135M-Instruct

A machine with a GPU follows the page's commands for one GPU, another those for two CPU cores.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record
from whole_runs import STEP, steps_of, tiny_run

PAGE = record.ROOT / "docs" / "tutorial.md"
CPUS = ["policy=megatron", "generation=vllm", "cluster.gpus_per_node=0"]
FEW = 5
"""Steps at the start and the end of a run whose rewards are averaged."""


def blocks(language: str) -> list[str]:
    """Return the page's blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def write_files(folder: Path) -> None:
    """Write the files of the page, each of which starts with its name."""
    for text in [*blocks("python"), *blocks("yaml")]:
        (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)


def commands() -> list[list[str]]:
    """Return the page's commands, split into words."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def chosen(on_gpu: bool) -> dict[str, list[str]]:
    """Return the commands to follow, by name."""
    trains = [words for words in commands() if words[:2] == ["nrl-lite", "train"]]
    [dry] = [words for words in trains if "--dry-run" in words]
    [train] = [words for words in trains if words != dry and ("policy=megatron" in words) != on_gpu]
    dry += [] if on_gpu else CPUS
    [evaluate] = [words for words in commands() if words[:2] == ["nrl-lite", "evaluate"]]
    return {"dry run": dry, "training": train, "evaluation": evaluate}


def follow(folder: Path, on_gpu: bool) -> dict[str, float]:
    """Run the commands in a folder; return the minutes of each."""
    minutes = {}
    for name, words in chosen(on_gpu).items():
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "nemo_rl_lite.cli", *words[1:]], cwd=folder)
        if done.returncode:
            sys.exit(f"{shlex.join(words)}: status {done.returncode}")
        minutes[name] = (time.perf_counter() - started) / 60
    return minutes


def main(arguments: list[str]) -> None:
    model = Path(arguments[0] if arguments else "models/smollm2-135m-instruct").resolve()
    hardware = record.describe_hardware()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        (folder / "models").mkdir()
        (folder / "models" / "smollm2-135m-instruct").symlink_to(model)
        subprocess.run([sys.executable, "rows.py"], cwd=folder, check=True)
        minutes = follow(folder, "gpus" in hardware)
        write(folder / "outputs" / "sums", minutes)


def write(run: Path, minutes: dict[str, float]) -> None:
    """Write the record of a run and the minutes of the commands."""
    steps, summary = steps_of(run), json.loads((run / "summary.json").read_text())
    rewards = [step["train/reward"] for step in steps]
    accuracies = [line["validation/accuracy"] for line in _lines(run) if "validation/accuracy" in line]
    config = f"{len(steps)} steps"
    results = [record.result(name, config, "min", [value]) for name, value in minutes.items()]
    results += [
        record.result("step time", config, "s", [step[STEP] for step in steps[1:]]),
        record.result("reward of the first steps", config, "reward", rewards[:FEW]),
        record.result("reward of the last steps", config, "reward", rewards[-FEW:]),
        record.result("held-out accuracy at the start", config, "share", accuracies[:1]),
        record.result("held-out accuracy at the end", config, "share", accuracies[-1:]),
    ]
    for process, peak in summary["peak_memory_bytes"].items():
        results.append(record.result(f"peak memory, {process}", config, "GiB", [peak / 2**30]))
    print(record.write("tutorial", results, []))


def _lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trial() -> None:
    """Choose the commands, and make the record of another run."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
    for on_gpu in (True, False):
        write(tiny_run(), dict.fromkeys(chosen(on_gpu), 1.0))


if __name__ == "__main__":
    record.start(main, trial)
