"""Runs as another process sees them: found, listed, followed and stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl_lite import cli
from nemo_rl_lite.errors import LauncherError, RefitError, RunStopped
from nemo_rl_lite.observability import runs
from nemo_rl_lite.observability.environment import COMMAND_FILE, CONFIG_FILE, STATUS_FILE
from nemo_rl_lite.observability.live import LIVE_FILE
from nemo_rl_lite.observability.runs import NoRunError, existing_or_run, find_run, read_state, read_states
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.run import following
from nemo_rl_lite.run.folder import locked, status_kept
from nemo_rl_lite.system.stopping import STOP_FILE


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(following, "_POLL_S", 0.01)


def make(place: str, steps: int = 3, name: str = "mine", metric: str = "train/reward", total: int | None = 9) -> Path:
    folder = Path("outputs") / place
    folder.mkdir(parents=True)
    config = {"run_name": name, "algorithm": {"max_num_steps": total}}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    (folder / COMMAND_FILE).write_text("nrl-lite train\n")
    lines = ["not the whole of a li"]
    for step in range(1, steps + 1):
        entry = {"step": step, "time": 100.0 * step, "timing/train/total_step_time": 4.0, metric: step / 10}
        lines += [json.dumps(entry), json.dumps({"step": step, "validation/accuracy": 0.5})]
    (folder / METRICS_FILE).write_text("\n".join(lines))
    return folder


@contextmanager
def running(folder: Path):
    with locked(folder), status_kept(folder, saves=True):
        yield


def ended(folder: Path, error: BaseException | None = None) -> Path:
    try:
        with running(folder):
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    return folder


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, "done"),
        (RefitError("bucket 3"), "failed"),
        (RunStopped(3, 9, "SIGTERM was received", "here"), "stopped"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_run_that_has_ended(error, state):
    found = read_state(ended(make("a/1"), error))
    assert (found.state, found.step, found.total, found.value) == (state, 3, 9, ("reward", 0.3))
    assert (found.seconds_per_step, found.seconds_left) == (4.0, None)
    assert following.ending(found).startswith(f"outputs/a/1: {state}")


def test_a_running_one_says_what_it_does_and_how_long_it_takes():
    folder = make("a/1", metric="train/loss", total=None)
    live = {"step": 4, "total": 5, "doing": "policy_training", "progress": "", "since": time.time() - 7}
    with running(folder):
        (folder / LIVE_FILE).write_text(json.dumps(live))
        now = time.time()
        last = {"step": 3, "time": now, "timing/train/total_step_time": 4.0, "ray/node.0.gpu.1.mem_gb": 70.0}
        last |= {"ray/node.0.mem_gb": 10.0, "ray/node.0.mem_total_gb": 64.0, "train/reward_errors": 2.0}
        before = {"step": 1, "time": now - 20, "timing/train/total_step_time": 4.0, "train/loss": 0.5}
        (folder / METRICS_FILE).write_text(f"{json.dumps(before)}\n{json.dumps(last)}\n")
        state = read_state(folder)
        rows = dict(following.status_rows(state))
    assert (state.is_running, state.total, state.value) == (True, 5, ("loss", 0.5))
    # Two steps are left, and the last two took 20 s with what was between them.
    assert state.seconds_left == pytest.approx(20, abs=2)
    assert rows["now"].startswith("train for 7 s") and rows["progress"].startswith("step 3/5 (60%)")
    assert "up to 70.0 GiB on each of 1 GPUs, 10.0 of 64.0 GiB" in rows["memory"]
    assert "reward errors in the last step: 2" in rows["problem"] and "none yet" in rows["checkpoint"]


def test_a_killed_launcher_is_lost_at_once():
    folder = make("a/1")
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from nemo_rl_lite.run.folder import locked, status_kept\n"
        "with locked(Path(sys.argv[1])), status_kept(Path(sys.argv[1]), True): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    assert read_state(folder).state == "lost"
    assert "ended without a message" in dict(following.status_rows(read_state(folder)))["problem"]
    with pytest.raises(LauncherError, match="has no train"):
        following.tail(folder, 3, print)


@pytest.mark.parametrize(("age_s", "state"), [(runs.LOST_S - 60, "running"), (runs.LOST_S + 60, "lost")])
def test_a_run_on_another_host_is_judged_by_its_signs_of_life(age_s, state):
    folder = ended(make("a/1"))
    status = json.loads((folder / STATUS_FILE).read_text()) | {"state": "running", "host": "another"}
    (folder / STATUS_FILE).write_text(json.dumps(status))
    (folder / LIVE_FILE).write_text("{}")
    os.utime(folder / LIVE_FILE, (time.time() - age_s,) * 2)
    assert read_state(folder).state == state


def test_runs_are_found_by_folder_name_and_as_the_last(capsys):
    old, new = make("a/1"), make("sweeps/sweep-1/0", name="other")
    for folder, started in ((old, "2026-01-01T00:00:00+00:00"), (new, "2026-01-02T00:00:00+00:00")):
        (folder / STATUS_FILE).write_text(json.dumps({"state": "done", "started": started}))
    assert [one.folder for one in read_states([Path("outputs")])] == [new, old]
    assert find_run("last") == find_run("outputs") == find_run("other") == find_run("sweep-1/0") == new
    assert find_run("mine") == find_run("outputs/a") == find_run(str(old.absolute())).relative_to(Path.cwd()) == old
    assert existing_or_run(Path("last")) == new and existing_or_run(Path("outputs")) == Path("outputs")
    for word, folders in {"othr": str(new), "outputs/a/2": str(old), "zzz": f"{new}, {old}"}.items():
        with pytest.raises(NoRunError, match=f"{word}: no such run; .* or last: {folders} "):
            existing_or_run(Path(word))
    with pytest.raises(NoRunError, match="no runs in nothing/"):
        find_run("last", Path("nothing"))


def test_the_table(capsys):
    ended(make("a/1"))
    table = following.runs_table(read_states([Path("outputs")]))
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table)
    words = shown.get().splitlines()[1].split()
    assert words[:6] == ["mine", "done", "3/9", "reward", "0.3", "4"] and words[-1] == "outputs/a/1"


LOG = """[2026-11-27 18:00:00,000][nemo_rl_lite.observability.console][INFO] step 1/3
[2026-11-27 18:00:00,000][nemo_rl_lite.run][INFO] not shown
with what belongs to it
[2026-11-27 18:00:00,000][nemo_rl_lite.observability.console][INFO] step 2/3
[2026-11-27 18:00:00,000][nemo_rl_lite.data][WARNING] two
lines
"""


@pytest.mark.parametrize(("lines", "expected"), [(0, []), (3, ["step 2/3", "WARNING: two", "lines"]), (99, None)])
def test_tail_shows_what_the_terminal_showed(lines, expected):
    folder, said = ended(make("a/1")), []
    (folder / following.LOG_FILE).write_text(LOG)
    assert following.tail(folder, lines, said.append).state == "done"
    assert said == (["step 1/3", "step 2/3", "WARNING: two", "lines"] if expected is None else expected)


def test_tail_follows_until_the_run_ends():
    folder, said = make("a/1"), []
    log, later = folder / following.LOG_FILE, [LOG[:20], LOG[20:200], LOG[200:]]
    log.write_text("")
    process = running(folder)
    process.__enter__()

    def state(_: Path) -> runs.RunState:
        if later:
            with log.open("a") as file:
                file.write(later.pop(0))
        elif process is not None:
            process.__exit__(None, None, None)
        return read_state(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "read_state", state)
        assert following.tail(folder, 0, said.append).state == "done"
    assert said == ["step 1/3", "step 2/3", "WARNING: two", "lines"]


@pytest.mark.parametrize(("now", "word"), [(False, "step"), (True, "now")])
def test_stop_writes_the_request_and_waits(monkeypatch, now, word):
    folder, asked = make("a/1"), []
    process = running(folder)
    process.__enter__()

    def state(_: Path) -> runs.RunState:
        if (folder / STOP_FILE).exists() and not asked:
            asked.append((folder / STOP_FILE).read_text().split()[0])
            process.__exit__(None, None, None)
        return read_state(folder)

    monkeypatch.setattr(following, "read_state", state)
    assert following.stop(folder, now).state == "done" and asked == [word]
    # A run that is not running is left as it is.
    (folder / STOP_FILE).unlink()
    assert following.stop(folder).state == "done" and not (folder / STOP_FILE).exists()


def test_stop_signals_a_process_of_this_host_whose_folder_is_full(monkeypatch):
    folder, sent = make("a/1"), []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(following, "request_end", full)
    monkeypatch.setattr(os, "kill", lambda *it: sent.append(it))
    with running(folder):
        assert following.stop(folder, limit_s=0.0).is_running
        following.stop(folder, now=True, limit_s=0.0)
        assert sent == [(os.getpid(), signal.SIGTERM), (os.getpid(), signal.SIGINT)]
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        with pytest.raises(LauncherError, match="another host"):
            following.stop(folder)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["runs"], 0, "outputs/a/1"),
        (["runs", "--json", "outputs/a"], 0, '"state": "failed"'),
        (["runs", "nowhere"], 2, "no such folder"),
        (["status", "mine"], 0, "bucket 3"),
        (["status", "--json"], 0, '"exit_status": 4'),
        (["tail", "mine"], 1, "outputs/a/1: failed: bucket 3"),
        (["stop", "mine"], 0, "not running, outputs/a/1: failed"),
        (["stop", "yours"], 2, "no such run"),
    ],
)
def test_the_verbs(words, code, said, capsys, monkeypatch):
    (ended(make("a/1"), RefitError("bucket 3")) / following.LOG_FILE).write_text(LOG)
    monkeypatch.setattr(sys, "argv", ["nrl-lite", *words])
    status = 0
    try:
        cli.main()
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, said in captured.out + captured.err) == (code, True)


def test_hundreds_of_runs_are_read_in_seconds():
    for number in range(300):
        ended(make(f"many/{number}", steps=5))
    began = time.perf_counter()
    assert len(read_states([Path("outputs")])) == 300
    assert time.perf_counter() - began < 30
