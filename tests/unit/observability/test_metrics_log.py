"""The metrics in a run's folder, also of a run that resumes; timers."""

import json
import resource

import pytest

from nemo_rl_lite.observability.sinks import JsonLines
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.observability.trackers import METRICS_FILE, MetricsLog, rewind
from nemo_rl_lite.validation.compose import compose_config


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_later_steps_are_put_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "value": step / 2}) + "\n" for step in range(5)))
    assert [entry["value"] for entry in rewind(path, 2)] == [0.0, 0.5, 1.0]
    assert [entry["step"] for entry in lines(path)] == [0, 1, 2]
    undone = tmp_path / "metrics-undone.jsonl"
    assert [entry["step"] for entry in lines(undone)] == [3, 4]
    rewind(path, 0)
    assert [entry["step"] for entry in lines(undone)] == [3, 4, 1, 2]


def test_a_line_that_was_cut_short_is_put_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "value": 1.0}\n{"step": 2, "val')
    assert len(rewind(path, 9)) == 1 and len(lines(path)) == 1
    assert rewind(tmp_path / "none.jsonl", 3) == []


@pytest.mark.parametrize("damage", [b"\xff", b"{", b"\x00"])
def test_a_line_with_a_wrong_byte_is_named_and_put_aside(tmp_path, caplog, damage):
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"step": step, "value": step / 2}).encode() + b"\n" for step in range(3)]
    path.write_bytes(whole[0] + whole[1].replace(b"0.5", damage) + whole[2])
    assert [entry["step"] for entry in rewind(path, 9)] == [0, 2]
    assert f"{path}: line 2 cannot be read" in caplog.text
    assert damage in (tmp_path / "metrics-undone.jsonl").read_bytes() and path.read_bytes() == whole[0] + whole[2]


def test_a_log_goes_on_and_remembers(tmp_path):
    logger = compose_config().logger
    log = MetricsLog.open(logger, tmp_path, {})
    for step in range(4):
        log.log(step, {"train/loss": step / 10, "train/grad_norm": float("nan")})
    log.close()
    assert lines(tmp_path / METRICS_FILE)[0]["train/grad_norm"] is None
    log = MetricsLog.open(logger, tmp_path, {}, done=2)
    log.log(3, {"train/loss": 0.7})
    log.close()
    assert log.series("train/loss") == ([0, 1, 2, 3], [0.0, 0.1, 0.2, 0.7])
    assert [line["step"] for line in lines(tmp_path / METRICS_FILE)] == [0, 1, 2, 3]


def test_where_the_disk_is_full_lines_wait_and_none_is_lost(tmp_path):
    """A limit on the file's size instead of a full disk; a line that fits in part is not left there."""
    sink, limits = JsonLines(tmp_path / METRICS_FILE), resource.getrlimit(resource.RLIMIT_FSIZE)
    sink.log(1, {"train/loss": 1.0})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / METRICS_FILE).stat().st_size + 10, limits[1]))
        sink.log(2, {"train/loss": 2.0})
        assert [line["step"] for line in lines(tmp_path / METRICS_FILE)] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sink.close()
    assert [line["step"] for line in lines(tmp_path / METRICS_FILE)] == [1, 2]


def test_timers_add_up_also_when_the_block_fails():
    timer = Timer()
    with timer("a"), timer("b"):
        pass
    with pytest.raises(RuntimeError), timer("a"):
        raise RuntimeError
    seconds = timer.take()
    assert set(seconds) == {"a", "b"} and seconds["a"] >= seconds["b"] >= 0
    assert timer.take() == {}
