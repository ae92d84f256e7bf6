import io

from rich.console import Console

from nemo_rl_lite.observability.console import BAR_CELLS, RunConsole, bar


def test_bars_are_as_long_as_their_share():
    assert bar(0) == "·" * BAR_CELLS
    assert bar(1) == bar(7) == "█" * BAR_CELLS
    assert bar(0.5) == "█" * (BAR_CELLS // 2) + "·" * (BAR_CELLS // 2)
    assert all(len(bar(share / 100)) == BAR_CELLS for share in range(101))


def test_a_step_is_one_plain_line_where_there_is_no_terminal():
    stream = io.StringIO()
    seconds = {"total_step_time": 2.0, "generation": 1.0, "policy_training": 0.5}
    RunConsole(Console(file=stream, width=40, soft_wrap=True)).step(3, 10, {"reward": 0.5}, seconds)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step  3/10  reward 0.5  2.00 s  generate ███··· 1.00")
    assert "\x1b" not in line
