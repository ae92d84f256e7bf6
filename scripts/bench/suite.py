"""The test suite: minutes of `scripts/test.sh`, or the lines that its tests cover.

python scripts/bench/suite.py minutes [--repeats N]
python scripts/bench/suite.py coverage --before CHECKOUT [--keep FOLDER]

`--before` is a checkout of an earlier commit, whose tests and coverage are measured for comparison. Coverage is
measured in every process that the tests start; its logs and numbers are kept in FOLDER, and a second call reuses them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import record

TARGET_MINUTES = 8
_SETTINGS = """[run]
parallel = true
patch = subprocess
sigterm = true
source_pkgs = nemo_rl_lite
data_file = {folder}/.coverage
core = sysmon
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("minutes").add_argument("--repeats", type=int, default=3)
    comparing = parts.add_parser("coverage")
    comparing.add_argument("--before", type=Path, required=True)
    comparing.add_argument("--keep", type=Path, default=record.ROOT / "outputs" / "suite")
    given = parser.parse_args()
    if given.part == "minutes":
        written = measure_minutes(given.repeats)
    else:
        written = compare_coverage(given.before.resolve(), given.keep.resolve())
    print(f"wrote {written.relative_to(record.ROOT)}")


def measure_minutes(repeats: int) -> Path:
    minutes, tests = [], []
    for _ in range(repeats):
        seconds, log = timed(["bash", "scripts/test.sh"], record.ROOT)
        minutes.append(seconds / 60)
        tests.append(passed(log))
        print(f"scripts/test.sh: {minutes[-1]:.2f} min, {tests[-1]} tests passed", flush=True)
    results = [
        record.result("scripts/test.sh", "now", "min", minutes),
        record.result("tests passed", "now", "tests", tests),
    ]
    bar = record.bar("minutes of scripts/test.sh, slowest run", max(minutes), TARGET_MINUTES, at_least=False)
    return record.write("suite-minutes", results, [bar])


def compare_coverage(before: Path, keep: Path) -> Path:
    covered = {
        side: coverage(checkout, keep / side) for side, checkout in {"now": record.ROOT, "before": before}.items()
    }
    results = [
        record.result(name, side, unit, [numbers[name]])
        for side, numbers in covered.items()
        for name, unit in UNITS.items()
    ]
    change = covered["now"]["lines covered"] / covered["before"]["lines covered"]
    bar = record.bar("coverage now over before", change, 1, at_least=True)
    return record.write("suite-coverage", results, [bar])


UNITS = {"tests passed": "tests", "tests failed": "tests", "lines of code": "lines", "lines covered": "%"}


def timed(command: list[str], checkout: Path) -> tuple[float, str]:
    """Seconds of a command that must succeed, and its output."""
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\n{command} failed with status {done.returncode}")
    return time.perf_counter() - started, done.stdout


def passed(log: str, word: str = "passed") -> int:
    """The number of tests that pytest reports under a word, such as passed or failed; 0 where it reports none."""
    found = re.findall(rf"(\d+) {word}\b", log)
    return int(found[-1]) if found else 0


def coverage(checkout: Path, folder: Path) -> dict[str, float]:
    """Run the tests of a checkout under coverage; the numbers that `UNITS` names."""
    log, numbers, settings = folder / "pytest.log", folder / "coverage.json", folder / "coverage.ini"
    if not numbers.exists():
        folder.mkdir(parents=True, exist_ok=True)
        settings.write_text(_SETTINGS.format(folder=folder))
        tool = [sys.executable, "-m", "coverage"]
        options = {"cwd": checkout, "env": os.environ | {"PYTHONPATH": str(checkout)}}
        tests = ["-m", "pytest", "-n", "2", "--dist", "loadscope"]
        with log.open("w") as file:
            subprocess.run([*tool, "run", f"--rcfile={settings}", *tests], stdout=file, check=False, **options)
        for step in (["combine", "-q"], ["json", "-q", "-o", str(numbers)]):
            subprocess.run([*tool, step[0], f"--rcfile={settings}", *step[1:]], check=True, **options)
    totals, text = json.loads(numbers.read_text())["totals"], log.read_text()
    return {
        "tests passed": passed(text),
        "tests failed": passed(text, "failed"),
        "lines of code": totals["num_statements"],
        "lines covered": totals["percent_covered"],
    }


if __name__ == "__main__":
    main()
