import subprocess
import sys
import threading
import time

from nemo_rl_lite.diagnosis.check import Check, Examination, Status, as_data, examine, failed, gather


def test_findings_come_in_order_with_their_subject(machine):
    one, two = Check("one", Status.OK, "1"), Check("two", Status.FAIL, "2", "3", "mend it", "a feature")
    findings = examine(
        machine(), [Examination("a", "x", lambda _: [one]), Examination("b", "y", lambda _: iter([two]))], 5
    )
    assert [(finding.subject, finding.check) for finding in findings] == [("a", one), ("b", two)]
    assert failed(findings) and not failed(findings[:1])
    assert as_data(findings)[1] == {
        "subject": "b",
        "name": "two",
        "status": "fail",
        "found": "2",
        "wanted": "3",
        "fix": "mend it",
        "off": "a feature",
    }


def test_what_hangs_is_a_line_and_hides_nothing(machine):
    forever = threading.Event()
    hangs = Examination("gpus", "driver", lambda _: [Check("never", Status.OK, str(forever.wait(60)))])
    fine = Examination("host", "memory", lambda _: [Check("memory", Status.OK, "enough")])
    started = time.monotonic()
    findings = examine(machine(), [hangs, fine], 2.0)
    forever.set()
    assert time.monotonic() - started < 55
    assert [finding.check.status for finding in findings] == [Status.WARN, Status.OK]
    assert findings[0].check.name == "driver" and findings[0].check.found == "no answer within 2 s"


def test_what_hangs_does_not_keep_the_process():
    code = (
        "import time\nfrom nemo_rl_lite.diagnosis.check import gather\n"
        "print(gather(lambda: time.sleep(60), 0.1, 'gave up'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55, check=True)
    assert done.stdout == "gave up\n"


def test_what_breaks_is_a_line(machine):
    def lacks_a_package(_):
        raise ModuleNotFoundError("No module named 'psutil'")

    def breaks(_):
        yield Check("before", Status.OK, "")
        raise KeyError("x")

    findings = examine(machine(), [Examination("a", "memory", lacks_a_package), Examination("a", "other", breaks)], 5)
    first, second = (finding.check for finding in findings)
    assert first.found == "not examined: No module named 'psutil'" and first.fix == "bash scripts/install.sh"
    assert (second.name, second.status, second.found) == ("other", Status.WARN, "not examined: KeyError: 'x'")


def test_gather_takes_what_comes_in_time():
    assert gather(lambda: 3, 5, 4) == 3
