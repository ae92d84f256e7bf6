"""How busy GPUs were by phase, from small traces whose times are known."""

import gzip
import json
from pathlib import Path

import pytest
import trace_busy

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


def test_it_prints_the_share_of_each_phase_and_writes_a_record(tmp_path, monkeypatch, capsys):
    """Generation takes 4 s, of which the engine's GPU works 3; training 5 s, of which those of two ranks work 4 and 2.
    Kernels overlap, copies count as well, and one of them lasts until training has begun."""
    step = tmp_path / "my-run" / "profile" / "step-00000003"
    phases = [("generation", 0, 4), ("policy_training", 4, 9), (REFIT, 9, 10), ("total_step_time", 0, 10)]
    write_trace(step / "driver.json.gz", [("user_annotation", *one) for one in phases], began=1)
    kernels = [("kernel", "a", 0.5, 2.5), ("kernel", "b", 1, 2.5), ("gpu_memcpy", "c", 3, 4.5)]
    write_trace(step / "generation-0.json.gz", [*kernels, ("cpu_op", "d", 0, 10)], began=2)
    first = [("kernel", "e", 4.5, 6.5), ("kernel", "f", 5, 6), ("kernel", "g", 7, 9)]
    write_trace(step / "policy-0.json.gz", [*first, ("user_annotation", "train", 4, 9)])
    write_trace(step / "policy-1.json.gz", [("kernel", "e", 4, 5), ("gpu_memset", "f", 8, 9)])
    monkeypatch.setenv("NRL_BENCH_OUT", str(tmp_path / "records"))
    monkeypatch.setenv("NRL_BENCH_COMMIT", "abc")
    trace_busy.main([str(step)])
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[0] == ["phase", "s", "generation-0", "policy-0", "policy-1"]
    assert table[1] == ["generate", "4.000", "75.0%", "0.0%", "0.0%"]
    assert table[2] == ["train", "5.000", "10.0%", "80.0%", "40.0%"]
    (file,) = (tmp_path / "records").iterdir()
    written = json.loads(file.read_text())
    assert written["bench"] == "busy-by-phase-my-run-step-00000003" and written["commit"] == "abc"
    busy = {(one["name"], one["config"]): one["median"] for one in written["results"]}
    assert busy["GPU busy for policy-0", "train"] == pytest.approx(4, abs=1e-4)
