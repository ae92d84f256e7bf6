import struct

from nemo_rl_lite.observability.metrics_log import MetricsLog
from nemo_rl_lite.observability.plots import LAST_STEPS, MEASURED, PREDICTED, plot_memory, plot_run, stacks
from nemo_rl_lite.observability.views import view_of


def log(steps: list[dict]) -> MetricsLog:
    metrics = MetricsLog([])
    metrics.log(0, {f"{PREDICTED}train/parameters": 100.0, f"{PREDICTED}generate/kv_cache": 50.0})
    for step, values in enumerate(steps, start=1):
        metrics.log(step, values)
    return metrics


def test_measured_bytes_are_means_over_the_last_steps():
    first = {f"{MEASURED}train/parameters": 1e9, f"{MEASURED}train/other": 3.0}
    last = {f"{MEASURED}train/parameters": 110.0, f"{MEASURED}generate/kv_cache": 7.0}
    metrics = log([first] + [last] * (LAST_STEPS - 1) + [last | {f"{MEASURED}train/parameters": 115.0}])
    assert stacks(metrics, MEASURED) == {"train": {"parameters": 111.0, "other": 3.0}, "generate": {"kv_cache": 7.0}}
    assert stacks(metrics, PREDICTED) == {"train": {"parameters": 100.0}, "generate": {"kv_cache": 50.0}}


def test_the_picture_is_drawn_where_something_was_measured(tmp_path):
    assert plot_memory(log([{f"{MEASURED}train/parameters": 2.0**30}]), tmp_path / "plots" / "memory.png", "run")
    assert (tmp_path / "plots" / "memory.png").stat().st_size > 0


def test_the_ages_of_tokens_have_a_panel_where_there_are_several(tmp_path):
    seconds = {"timing/train/total_step_time": 1.0, "timing/train/policy_training": 0.5}
    one = [seconds | {"train/age_0/tokens_share": 1.0}] * 2
    several = [seconds | shares for shares in ({"train/age_0/tokens_share": 1.0}, {"train/age_1/tokens_share": 1.0})]
    widths = []
    for name, steps in (("one", one), ("several", several)):
        plot_run(log(steps), tmp_path / f"{name}.png", name, view_of("grpo"))
        widths.append(struct.unpack(">I", (tmp_path / f"{name}.png").read_bytes()[16:20])[0])
    assert widths[1] - widths[0] == widths[0] / 3


def test_nothing_is_drawn_where_nothing_was_measured(tmp_path):
    assert not plot_memory(log([{"train/loss": 1.0}]), tmp_path / "memory.png", "run")
    assert not list(tmp_path.iterdir())
