"""The line about a run's start."""

from nemo_rl_lite.observability.console import start_line
from nemo_rl_lite.observability.timer import Timer


def test_the_launchers_parts_and_the_rest_add_up_to_the_total():
    seconds = {"command": 2.0, "ray": 3.0, "data": 0.01, "policy/import": 9.0, "policy/model": 0.04, "total": 8.0}
    assert start_line(seconds) == ("started in 8.0 s: command 2.0, ray 3.0, other 3.0; policy's processes: import 9.0")


def test_seconds_that_were_measured_elsewhere_add_up_with_a_timers_own():
    timer = Timer()
    with timer("ray"):
        pass
    timer.add("ray", 2.0)
    timer.add("policy/import", 1.0)
    taken = timer.take()
    assert 2.0 <= taken["ray"] < 3.0
    assert taken["policy/import"] == 1.0
    assert timer.take() == {}
