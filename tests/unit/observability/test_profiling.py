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
