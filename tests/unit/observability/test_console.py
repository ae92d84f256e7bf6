import io
import math

import pytest
from rich.console import Console

from nemo_rl_lite.observability import console as module
from nemo_rl_lite.observability.console import (
    BAR_CELLS,
    TREND_VALUES,
    Pace,
    RunConsole,
    bar,
    duration,
    readable,
    sparkline,
)
from nemo_rl_lite.observability.sink import Sample

SECONDS = {"total_step_time": 2.0, "generation": 1.0, "policy_training": 0.5}


def printed(width: int = 100, **options) -> tuple[RunConsole, io.StringIO]:
    stream = io.StringIO()
    return RunConsole(Console(file=stream, width=width, soft_wrap=True, **options)), stream


def test_bars_are_as_long_as_their_share():
    assert bar(0) == "·" * BAR_CELLS
    assert bar(1) == bar(7) == "█" * BAR_CELLS
    assert bar(0.5) == "█" * (BAR_CELLS // 2) + "·" * (BAR_CELLS // 2)
    assert all(len(bar(share / 100)) == BAR_CELLS for share in range(101))


def test_a_step_is_one_plain_line_where_there_is_no_terminal():
    console, stream = printed(width=40)
    console.step(3, 10, {"reward": 0.5, "kl": 0.25}, SECONDS, [0.0, 0.25, 0.5])
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step  3/10  reward 0.5 ▁▅█  kl 0.25  2.00 s  14 s left  generate ███··· 1.00")
    assert "\x1b" not in line


def test_a_step_says_how_long_engines_beside_the_policy_were_idle():
    console, stream = printed()
    console.step(3, 10, {"reward": 0.5, "age": 1.25}, SECONDS, idle=1.5)
    (line,) = stream.getvalue().splitlines()
    assert "  age 1.25  2.00 s" in line and line.endswith(" train █▌···· 0.50 engines idle ████▌· 1.50")


@pytest.mark.parametrize(("saving", "shown"), [(1.0, " checkpoint ███··· 1.00"), (0.05, " 0.50")])
def test_a_step_says_how_long_its_checkpoint_took_where_it_took_long(saving, shown):
    console, stream = printed()
    console.step(3, 10, {"reward": 0.5}, SECONDS | {"checkpointing": saving})
    assert stream.getvalue().splitlines()[0].endswith(shown)


def test_a_long_operation_tells_how_far_it_is(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    console, stream = printed()
    with console.busy("step 3: generating", announced=False) as tell:
        for second in range(0, 100, 5):
            now[0] = 100.0 + second
            tell(f"{second} of 99 prompts")
    # Without a terminal a short step says nothing, a long one now and then.
    assert stream.getvalue().splitlines() == [f"step 3: generating: {second} of 99 prompts" for second in (30, 60, 90)]
    console, stream = printed(force_terminal=True)
    with console.busy("step 3: generating", announced=False) as tell:
        tell("5 of 99 prompts")
    assert "step 3: generating: 5 of 99 prompts" in stream.getvalue()


def test_a_narrow_terminal_gets_whole_words_and_no_bars():
    console, stream = printed(width=50, force_terminal=True, color_system=None)
    console.step(3, 10, {"reward": 0.5, "kl": 0.25}, SECONDS, [0.0, 0.25, 0.5])
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 50 for line in lines) and "█" not in stream.getvalue()
    said = " ".join(" ".join(lines).split())
    assert said == "step 3/10 reward 0.5 kl 0.25 2.00 s 14 s left generate 1.00 train 0.50"


def test_the_last_step_leaves_nothing():
    console, stream = printed()
    console.step(10, 10, {"loss": 0.5}, SECONDS)
    assert "left" not in stream.getvalue()


def test_what_is_left_counts_what_comes_between_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    pace = Pace()
    assert pace.left(1, 11, 2.0) == pytest.approx(20)
    # A validation of ten seconds.
    now[0] += 12
    assert pace.left(2, 11, 2.0) == pytest.approx(9 * 7)
    # Back to a checkpoint: the pace of earlier steps is forgotten.
    now[0] += 60
    assert pace.left(2, 11, 2.0) == pytest.approx(9 * 2)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5400, "90 min"), (11_100, "3 h 05 min")]
)
def test_durations(seconds, expected):
    assert duration(seconds) == expected


def test_a_trend_is_drawn_between_its_lowest_and_highest():
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([]) == sparkline([math.nan]) == ""
    assert sparkline([1.0, math.nan, 2.0]) == "▁ █"
    assert len(sparkline(list(range(99)))) == TREND_VALUES


def test_samples_are_a_table_in_which_nothing_is_markup_or_moves_the_cursor():
    console, stream = printed(force_terminal=True, color_system=None)
    console.samples(10, [Sample("1+1\nplease", "[red]2[/red] \x1b[2J\r\x07 é 漢", 0.5)])
    text = stream.getvalue()
    assert "samples of step 10" in text and "[red]2[/red]" in text and "0.5" in text and "please" in text
    assert "\\x1b[2J\\r\\x07" in text and "é 漢" in text
    assert not set("\x1b\r\x07") & set(text)


def test_long_samples_have_an_end():
    assert len(readable("x" * 10_000)) < 700 and " ... " in readable("x" * 10_000)
