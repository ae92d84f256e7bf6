import json

import pytest

from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.observability.trackers import METRICS_FILE, JsonLines, MetricsLog, under


def test_json_lines_are_on_disk_at_once_and_history_is_kept(tmp_path):
    metrics = MetricsLog([JsonLines(tmp_path / METRICS_FILE)])
    metrics.log(1, under("train", {"reward": 0.5}))
    metrics.log(2, under("train", {"reward": 0.75}) | under("validation", {"accuracy": 1.0}))
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["validation/accuracy"] == 1.0 and lines[0]["time"] <= lines[1]["time"]
    assert metrics.series("train/reward") == ([1, 2], [0.5, 0.75])
    assert metrics.series("validation/accuracy") == ([2], [1.0])
    metrics.close()


def test_timers_add_up_also_when_the_block_fails():
    timer = Timer()
    with timer("a"), timer("b"):
        pass
    with pytest.raises(RuntimeError), timer("a"):
        raise RuntimeError
    seconds = timer.take()
    assert set(seconds) == {"a", "b"} and seconds["a"] >= seconds["b"] >= 0
    assert timer.take() == {}
