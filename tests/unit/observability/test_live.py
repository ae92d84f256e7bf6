"""What a run shows others while it runs."""

import json
import signal
import time

import pytest

from nemo_rl_lite.observability import live, liveness
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.live import LIVE_FILE, doing, shown_to_others
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.system.stopping import interrupt, request_end


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(live, "_POLL_S", 0.01)
    monkeypatch.setattr(live, "_activities", [])
    monkeypatch.setattr(liveness, "_counts", {})


def seen(folder, **expected) -> bool:
    """Wait until the file has these values."""
    for _ in range(500):
        content = json.loads((folder / LIVE_FILE).read_text()) if (folder / LIVE_FILE).exists() else {}
        if all(content.get(name) == value for name, value in expected.items()):
            return True
        time.sleep(0.01)
    return False


def test_the_innermost_activity_and_its_progress_are_shown(tmp_path):
    timer = Timer()
    with shown_to_others(tmp_path), timer("total_step_time"):
        liveness.note_progress(step=3, total=9, micro_batch=4)
        assert seen(tmp_path, doing="total_step_time", step=3, total=9)
        with RunConsole().busy("step 3: generating", announced=False) as tell:
            tell("5 of 8")
            assert seen(tmp_path, doing="step 3: generating", progress="5 of 8")
    content = json.loads((tmp_path / LIVE_FILE).read_text())
    assert (content["step"], content.get("doing")) == (3, None) and "micro_batch" not in content


def test_a_request_reaches_the_main_thread(tmp_path):
    # A run handles it, also after Ray has replaced the handler of SIGTERM.
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), shown_to_others(tmp_path):
            request_end(tmp_path)
            time.sleep(5)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path):
    with shown_to_others(tmp_path / "gone"), doing("something"):
        time.sleep(0.05)
