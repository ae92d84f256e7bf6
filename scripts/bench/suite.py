"""Minutes of three runs of `scripts/test.sh`, which also checks style and types: suite.py [RUNS]"""

import re
import subprocess
import sys
import time
from collections.abc import Sequence

import record

TARGET_MINUTES = 8


def main(arguments: list[str]) -> None:
    measure(int(arguments[0]) if arguments else 3, ["bash", "scripts/test.sh"])


def measure(repeats: int, command: Sequence[str]) -> None:
    """Run the command several times, and write the record."""
    minutes, tests = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=record.ROOT, check=False, **pipes)
        if done.returncode:
            sys.exit(f"{done.stdout}\n{command} failed with status {done.returncode}")
        minutes.append((time.perf_counter() - started) / 60)
        tests.append(int(re.findall(r"(\d+) passed\b", done.stdout)[-1]))
        print(f"{minutes[-1]:.2f} min, {tests[-1]} tests passed", flush=True)
    results = [
        record.result("scripts/test.sh", "now", "min", minutes),
        record.result("tests passed", "now", "tests", tests),
    ]
    bar = record.bar("minutes of scripts/test.sh, slowest run", max(minutes), TARGET_MINUTES, at_least=False)
    print(record.write("suite-minutes", results, [bar]))


def trial() -> None:
    measure(2, [sys.executable, "-c", "print('1 failed, 17 passed in 0.1 s')"])


if __name__ == "__main__":
    record.start(main, trial)
