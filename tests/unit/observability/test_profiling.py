"""Traces of this process."""

import gzip
import json

import torch

from nemo_rl_lite.observability import profiling
from nemo_rl_lite.observability.timer import Timer


def names(file) -> list[str]:
    with gzip.open(file) as trace:
        return [event["name"] for event in json.load(trace)["traceEvents"] if event.get("cat") == "user_annotation"]


def test_a_trace_has_the_phases_by_name(tmp_path):
    timer = Timer()
    profiling.begin("torch")
    with timer("generation"), profiling.span("micro-batch 1"):
        torch.ones(3).sum()
    profiling.end(tmp_path / "made" / "policy-0.json.gz")
    with timer("after"):
        pass
    assert names(tmp_path / "made" / "policy-0.json.gz") == ["generation", "micro-batch 1"]


def test_an_abandoned_trace_leaves_nothing_and_the_next_one_starts_empty(tmp_path):
    profiling.begin("torch")
    with profiling.span("before"):
        pass
    profiling.end(None)
    profiling.end(tmp_path / "none.json.gz")
    assert not list(tmp_path.iterdir())
    profiling.begin("torch")
    # A run that starts again after a loss.
    profiling.begin("torch")
    with profiling.span("after"):
        pass
    profiling.end(tmp_path / "driver.json.gz")
    assert names(tmp_path / "driver.json.gz") == ["after"]


def test_for_nsys_nothing_is_written(tmp_path):
    profiling.begin("nsys")
    with profiling.span("generation"):
        pass
    profiling.end(tmp_path / "policy-0.json.gz")
    assert not list(tmp_path.iterdir())


def test_ranges_are_there_for_nvtx_as_well(monkeypatch):
    noted = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", noted.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: noted.append("end"))
    profiling.begin("nsys", on_device=False)
    with Timer()("generation"), profiling.span("micro-batch 1"):
        pass
    profiling.end(None)
    assert noted == ["generation", "micro-batch 1", "end", "end"]


def test_nothing_is_made_where_nothing_is_recorded():
    assert profiling.span("generation") is profiling.span("train")
