"""Ending early, with a checkpoint."""

import os
import signal

import pytest

from nemo_rl_lite.system import stopping as stopping_module
from nemo_rl_lite.system.stopping import (
    STOP_FILE,
    Stopping,
    forget_request,
    interrupt_on_signals,
    note_signal,
    obey_request,
    request_end,
    seconds,
    was_asked_to_end,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_kept_until_the_step_is_done(number, capfd, monkeypatch):
    stopping = Stopping(None, lambda: 0.0)
    before = signal.getsignal(number)
    with stopping.listening():
        assert stopping.after_step() is None
        os.kill(os.getpid(), number)
        assert stopping.after_step() == f"{number.name} was received"
        said = f"{number.name}: the run ends after this step, with a checkpoint; again to end it at once\n"
        assert capfd.readouterr().err == said
        # `timeout` sends one to the process and one to its group.
        os.kill(os.getpid(), number)
        monkeypatch.setattr(stopping_module, "_SAME_REQUEST_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_signal_that_came_while_the_run_was_starting_again_is_not_lost():
    note_signal(signal.SIGUSR1)
    assert Stopping(None, lambda: 0.0).after_step() == "SIGUSR1 was received"


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that has begun, in a process that ends on signals."""
    before = {number: signal.getsignal(number) for number in stopping_module.SIGNALS}
    interrupt_on_signals()
    forget_request(tmp_path)
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("signals", [True, False])
def test_a_request_in_the_runs_folder_is_kept_until_the_step_is_done(folder, signals):
    stopping = Stopping(None, lambda: 0.0)
    with stopping.listening(signals):
        assert obey_request(folder) == "" and stopping.after_step() is None
        request_end(folder)
        assert "ends after this step, with a checkpoint" in obey_request(folder)
        assert obey_request(folder) == "", "it is obeyed once"
        assert stopping.after_step().startswith("nrl-lite stop asked for it by ")
        request_end(folder, now=True)
        with pytest.raises(KeyboardInterrupt):
            obey_request(folder)
    assert was_asked_to_end()
    forget_request(folder)
    assert not was_asked_to_end() and (folder / STOP_FILE).read_text() == ""


def test_a_request_ends_a_run_that_is_starting_but_not_one_that_writes_its_last_files(folder):
    request_end(folder)
    with pytest.raises(KeyboardInterrupt):
        obey_request(folder)
    assert stopping_module.interrupted_status(saves=True) == 75
    forget_request(folder)
    with Stopping(None, lambda: 0.0).listening():
        pass
    request_end(folder)
    obey_request(folder)


def test_no_step_is_begun_that_could_end_too_late(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("nemo_rl_lite.system.stopping.time.monotonic", lambda: now[0])
    stopping = Stopping(100.0, lambda: now[0])
    with stopping.listening():
        for now[0] in (30.0, 40.0, 69.0):
            assert stopping.after_step() is None
        # The longest step took 30 s.
        now[0] = 71.0
        assert "must_save_by = 100 s" in stopping.after_step()


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (90, 90), ("1:30", 90.0), ("2:00:00", 7200.0), ("1:00:00:05", 86405.0), ("0:5", 5.0)],
)
def test_durations(given, expected):
    assert seconds(given) == expected
