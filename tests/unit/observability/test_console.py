import io
import math

import pytest
from rich.console import Console

from nemo_rl_lite.observability import console as module
from nemo_rl_lite.observability.console import Pace, RunConsole, start_line
from nemo_rl_lite.observability.sinks import Sample

SECONDS = {"total_step_time": 2.0, "generation": 1.0, "policy_training": 0.5}


def printed(width: int = 100, **options) -> tuple[RunConsole, io.StringIO]:
    stream = io.StringIO()
    return RunConsole(Console(file=stream, width=width, soft_wrap=True, **options)), stream


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


def test_samples_are_a_table_in_which_nothing_is_markup_or_moves_the_cursor():
    console, stream = printed(force_terminal=True, color_system=None)
    console.samples(10, [Sample("1+1\nplease", "[red]2[/red] \x1b[2J\r\x07 é 漢", 0.5)])
    text = stream.getvalue()
    assert "samples of step 10" in text and "[red]2[/red]" in text and "0.5" in text and "please" in text
    assert "\\x1b[2J\\r\\x07" in text and "é 漢" in text
    assert not set("\x1b\r\x07") & set(text)


def test_a_step_is_one_plain_line_where_there_is_no_terminal():
    console, stream = printed(width=40)
    seconds = SECONDS | {"checkpointing": 1.0}
    console.step(3, 10, {"reward": 0.5, "age": math.nan}, seconds, [0.0, math.nan, 0.5], idle=1.5)
    (line,) = stream.getvalue().splitlines()
    parts = ["step  3/10", "reward 0.5", "2.00 s", "14 s left", "generate", "checkpoint", "engines idle"]
    assert [part for part in parts if part not in line] == [] and "\x1b" not in line


def test_a_narrow_terminal_gets_lines_that_fit():
    console, stream = printed(width=50, force_terminal=True, color_system=None)
    console.step(10, 10, {"reward": 0.5, "kl": 0.25}, SECONDS, [0.0, 0.25, 0.5])
    assert all(len(line) <= 50 for line in stream.getvalue().splitlines()) and "left" not in stream.getvalue()
    console, stream = printed(width=50, force_terminal=True, color_system=None)
    console.say("words that are not broken at the end of a line [a] " * 2)
    assert all(len(line) <= 50 for line in stream.getvalue().splitlines())
    console.table("a title that is wider than the table below it and the terminal", ["", "x"], [["a", "b"]])
    assert all(len(line) <= 50 for line in stream.getvalue().splitlines())
    assert stream.getvalue().split()[:24] == ("words that are not broken at the end of a line [a] " * 2).split()


def test_the_launchers_parts_and_the_rest_add_up_to_the_total():
    seconds = {"command": 2.0, "ray": 3.0, "data": 0.01, "policy/import": 9.0, "policy/model": 0.04, "total": 8.0}
    assert start_line(seconds) == "started in 8.0 s: ray 3.0, other 3.0, command 2.0"
