"""A reward that an untrained model also gets some of, and others that let a test keep step with a run, or end it."""

import json
import os
import signal
import time
from pathlib import Path

from nemo_rl_lite.system.stopping import Stopping

_SEEN = "NEMO_RL_LITE_TEST_SEEN"
# Names the metrics of the run that `terminate_twice` ends.
METRICS = "NEMO_RL_LITE_TEST_METRICS"


def share_of_digits(response: str, answer: str) -> float:
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


class Gate:
    """Of the run in `folder`: no step's rewards are there before the test has passed the step before it."""

    def __init__(self, folder: Path):
        self._seen = folder.with_name(f"{folder.name}.seen")
        self.overrides = (f"reward.name={__name__}.gated_share_of_digits", "reward.timeout_s=600")
        self.passed(0)

    @property
    def environment(self) -> dict[str, str]:
        return {_SEEN: str(self._seen)}

    def passed(self, step: int) -> None:
        self._seen.write_text(str(step))


def nothing(response: str, answer: str) -> float:
    return 0.0


def gated_share_of_digits(response: str, answer: str) -> float:
    seen = Path(os.environ[_SEEN])
    metrics = seen.with_suffix("") / "metrics.jsonl"
    while _steps_in(metrics) > int(seen.read_text() or 0):
        time.sleep(0.05)
    return share_of_digits(response, answer)


def terminate_twice(response: str, answer: str) -> float:
    """In the second step, two signals to the launcher."""
    if _steps_in(Path(os.environ[METRICS])) == 1 and listens():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            # A second one that comes at once is the same request.
            time.sleep(1.2)
    return share_of_digits(response, answer)


def listens() -> bool:
    """Whether this process' run keeps a signal until its step is done. Other code may have handlers, too."""
    return getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is Stopping._receive


def _steps_in(metrics: Path) -> int:
    """How many steps a run has done; -1 before it has measured anything."""
    if not metrics.exists():
        return -1
    lines = metrics.read_text().splitlines()
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
