import threading
import time

from nemo_rl_lite.diagnosis.check import Check, CheckStatus, examine, judge, lines


def test_checks_come_in_order_with_their_subject(machine):
    one, two = Check("one", CheckStatus.OK, "1"), Check("two", CheckStatus.FAIL, "2", "3", "fix it", "a feature")
    checks = examine(machine(), {"a": (lambda _: [one],), "b": (lambda _: iter([two]),)}, 5)
    assert [(check.subject, check.name) for check in checks] == [("a", "one"), ("b", "two")]


def test_what_hangs_is_a_line_and_hides_nothing(machine):
    forever = threading.Event()

    def the_driver(_):
        return [Check("never", CheckStatus.OK, str(forever.wait(60)))]

    started = time.monotonic()
    checks = examine(machine(), {"a": (the_driver, lambda _: [Check("memory", CheckStatus.OK, "enough")])}, 2.0)
    forever.set()
    assert time.monotonic() - started < 55
    assert [check.status for check in checks] == [CheckStatus.WARN, CheckStatus.OK]
    assert checks[0].name == "the driver" and checks[0].found == "no answer within 2 s"


def test_what_breaks_is_a_line(machine):
    def memory(_):
        raise ModuleNotFoundError("No module named 'psutil'")

    def other(_):
        yield Check("before", CheckStatus.OK, "")
        raise KeyError("x")

    first, second = examine(machine(), {"a": (memory, other)}, 5)
    assert first.found == "not examined: No module named 'psutil'" and first.fix == "bash scripts/install.sh"
    assert (second.name, second.status, second.found) == ("other", CheckStatus.WARN, "not examined: KeyError: 'x'")


def test_lines_say_what_to_do_where_a_check_is_not_ok():
    checks = [
        judge("one", True, "1", "2", "fix it", "a feature"),
        judge("other", False, "1", "2", "fix it", "a feature"),
    ]
    assert checks[0].fix == checks[0].off == ""
    assert lines(checks)[1:] == [
        "  ok       one    1 (wanted: 2)",
        "  warn     other  1",
        "                  wanted: 2",
        "                  fix: fix it",
        "                  off: a feature",
        "1 ok, 1 warn, 0 fail, 0 skipped: nothing found that prevents a run",
    ]
    assert "\x1b[33mwarn" in lines(checks, coloured=True)[2]
