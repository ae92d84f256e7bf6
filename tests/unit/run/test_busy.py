"""How busy GPUs were by phase, from small traces whose times are known."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from nemo_rl_lite.run.report import record
from nemo_rl_lite.run.report.busy import busy_by_phase, common, read_trace, traces_of, union
from nemo_rl_lite.run.report.page import page
from nemo_rl_lite.run.report.record import read_run
from tests.unit.run.run_folders import make_run

ROOT = Path(__file__).parents[3]
REFIT = "prepare_for_generation/transfer_and_update_weights"
EPOCH = 1_790_857_026


def write_trace(file: Path, events: list[tuple], began: int = 0) -> None:
    """`events`: (category, name, begin, end) in seconds of the step. The process' own clock began `began` seconds into
    the step."""
    written = [
        {"ph": "X", "cat": cat, "name": name, "ts": (begin - began) * 1e6, "dur": (end - begin) * 1e6}
        for cat, name, begin, end in events
    ]
    others = [{"ph": "M", "name": "process_name"}, {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1.0}]
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt") as opened:
        json.dump({"baseTimeNanoseconds": (EPOCH + began) * 10**9, "traceEvents": [*others, *written]}, opened)


def write_step(folder: Path) -> None:
    """Generation takes 4 s, of which the engine's GPU works 3; training 5 s, of which those of two ranks work 4 and 2.
    Kernels overlap, copies count as well, and one of them lasts until training has begun."""
    phases = [("generation", 0, 4), ("policy_training", 4, 9), (REFIT, 9, 10), ("total_step_time", 0, 10)]
    write_trace(folder / "driver.json.gz", [("user_annotation", *one) for one in phases], began=1)
    kernels = [("kernel", "a", 0.5, 2.5), ("kernel", "b", 1, 2.5), ("gpu_memcpy", "c", 3, 4.5)]
    others = [("user_annotation", "generate", 0.25, 4), ("gpu_user_annotation", "generate", 0.25, 4)]
    write_trace(folder / "generation-0.json.gz", [*kernels, *others, ("cpu_op", "d", 0, 10)], began=2)
    first = [("kernel", "e", 4.5, 6.5), ("kernel", "f", 5, 6), ("kernel", "g", 7, 9)]
    outer = [("user_annotation", "train", 4, 9), ("user_annotation", "micro-batch 1", 4.5, 8)]
    write_trace(folder / "policy-0.json.gz", [*first, *outer])
    write_trace(folder / "policy-1.json.gz", [("kernel", "e", 4, 5), ("gpu_memset", "f", 8, 9), *outer])


def near(expected):
    return pytest.approx(expected, abs=1e-4)


def test_each_phase_has_the_seconds_in_which_gpus_worked(tmp_path):
    write_step(tmp_path)
    generate, train, refit, whole = busy_by_phase(traces_of(tmp_path))
    assert (generate.phase, train.phase, refit.phase, whole.phase) == ("generate", "train", "refit", "whole step")
    assert [one.seconds for one in (generate, train, refit, whole)] == near([4, 5, 1, 10])
    assert generate.busy == near({"generation-0": 3, "policy-0": 0, "policy-1": 0})
    assert train.busy == near({"generation-0": 0.5, "policy-0": 4, "policy-1": 2})
    assert whole.busy == near({"generation-0": 3.5, "policy-0": 4, "policy-1": 2})
    shares = train.shares()
    assert shares["policy"] == near([0.6, 0.4, 0.8]) and shares["generation"] == near([0.1] * 3)


def test_a_trace_alone_has_its_outermost_ranges(tmp_path):
    write_step(tmp_path)
    (tmp_path / "driver.json.gz").unlink()
    (train,) = busy_by_phase(traces_of(tmp_path / "policy-0.json.gz"))
    assert train.phase == "train" and train.busy == near({"policy-0": 4})
    with pytest.raises(ValueError, match=r"driver\.json\.gz is missing"):
        busy_by_phase(traces_of(tmp_path))


def test_a_trace_beside_the_launchers_has_its_phases(tmp_path):
    write_step(tmp_path)
    found = {one.phase: one.busy for one in busy_by_phase(traces_of(tmp_path / "policy-1.json.gz"))}
    assert list(found) == ["generate", "train", "refit", "whole step"]
    assert found["train"] == near({"policy-1": 2})


def test_times_that_overlap_count_once():
    assert union([(3, 4), (0, 2), (1, 2.5), (2.5, 3)]) == [(0, 4)] and union([]) == []
    assert list(common([(0, 2), (3, 5)], [(1, 4), (4.5, 9)])) == [(1, 2), (3, 4), (4.5, 5)]
    assert list(common([(0, 1)], [(1, 2)])) == []


def test_a_run_without_gpus_has_no_table(tmp_path):
    write_trace(tmp_path / "driver.json.gz", [("user_annotation", "total_step_time", 0, 1)])
    write_trace(tmp_path / "policy-0.json.gz", [("user_annotation", "train", 0, 1), ("cpu_op", "a", 0, 1)])
    assert busy_by_phase(traces_of(tmp_path)) == []


def test_a_report_has_the_newest_profiled_step(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    assert read_run(folder).busy is None
    write_trace(folder / "profile" / "step-00000002" / "driver.json.gz", [])
    write_step(folder / "profile" / "step-00000003")
    run = read_run(folder)
    assert run.busy["step"] == 3 and run.notes == []
    generate, *_, whole = run.busy["phases"]
    assert generate["phase"] == "generate" and generate["shares"]["generation"][0] == near(0.75)
    assert whole["seconds"] == near(10) and '"busy":{"step":3' in page([run])


def test_a_broken_trace_is_a_note(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    file = folder / "profile" / "step-00000003" / "policy-0.json.gz"
    write_step(file.parent)
    file.write_bytes(file.read_bytes()[:-20])
    run = read_run(folder)
    assert run.busy is None and any("step-00000003 cannot be read" in note for note in run.notes)
    file.write_bytes(gzip.compress(b"[]"))
    with pytest.raises(ValueError, match="no trace"):
        read_trace(file)


def test_large_traces_are_left_to_the_script(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=1)
    write_step(folder / "profile" / "step-00000003")
    monkeypatch.setattr(record, "_TRACES", 100)
    run = read_run(folder)
    assert run.busy is None and any("trace_busy.py" in note for note in run.notes)


def test_the_script_prints_the_table_and_writes_a_record(tmp_path, monkeypatch, capsys):
    step = tmp_path / "my-run" / "profile" / "step-00000003"
    write_step(step)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "scripts" / "bench")])
    monkeypatch.setenv("NRL_BENCH_OUT", str(tmp_path / "records"))
    monkeypatch.setenv("NRL_BENCH_COMMIT", "abc")
    import trace_busy

    trace_busy.main([str(step)])
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[0] == ["phase", "s", "generation-0", "policy-0", "policy-1"]
    assert table[2] == ["train", "5.000", "10.0%", "80.0%", "40.0%"]
    (file,) = (tmp_path / "records").iterdir()
    written = json.loads(file.read_text())
    assert written["bench"] == "busy-by-phase-my-run-step-00000003" and written["commit"] == "abc"
    busy = {(one["name"], one["config"]): one["median"] for one in written["results"]}
    assert busy["GPU busy for policy-0", "train"] == near(4) and busy["seconds", "refit"] == near(1)
