"""The time limit of a reward holds, and a late reward costs one sample only."""

import os
import time

import psutil
import pytest

from nemo_rl_lite.config.schema import RewardConfig
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rewards.judge import make_judge
from nemo_rl_lite.rewards.pool import RewardError

HERE = "tests.unit.rewards.test_judge"


def moody(response: str, answer: str) -> float:
    """A reward that can fail in every way."""
    if response == "power":
        return float(len(str(7**7**9)))  # one step of C code, which no signal handler of Python interrupts
    if response == "sleep":
        time.sleep(600)
    if response == "raise":
        raise ValueError("x" * 5000)
    if response == "die":
        os._exit(7)
    return float(response == answer)


def judge(name: str, timeout_s: float | None, processes: int = 2):
    return make_judge(RewardConfig(name=name, kwargs={}, timeout_s=timeout_s, processes=processes))


def problems(*answers: str) -> list[Problem]:
    return [Problem(chat("?"), answer) for answer in answers]


def test_a_sample_that_hangs_is_an_error_and_the_others_get_their_verdict():
    moody_judge = judge(f"{HERE}.moody", timeout_s=3.0)
    responses = ["1", "power", "2", "raise", "sleep", "3", "die", "9"]
    started = time.perf_counter()
    verdicts = moody_judge(responses, problems(*"12345678"))
    assert time.perf_counter() - started < 200
    assert [verdict for verdict in verdicts if isinstance(verdict, float)] == [1.0, 0.0, 0.0, 0.0]
    late = "no verdict within reward.timeout_s = 3"
    assert str(verdicts[1]) == str(verdicts[4]) == late
    assert str(verdicts[3]).startswith("ValueError: xxx") and len(str(verdicts[3])) < 400
    assert str(verdicts[6]) == "the judging process ended with status 7"
    assert moody_judge(["5", "6"], problems("5", "5")) == [1.0, 0.0], "the pool survives"


def test_a_rollout_is_judged_fast_but_for_a_number_that_no_computer_can_hold():
    math_judge = judge("math", timeout_s=4.0)
    verdicts = math_judge(["$9^{9^{9^9}}$", "\\boxed{4}"], problems("42", "4"))
    assert isinstance(verdicts[0], RewardError) and verdicts[1] == 1.0
    started = time.perf_counter()
    verdicts = math_judge([f"3 * {i} is {3 * i}" for i in range(500)], problems(*(str(3 * i) for i in range(500))))
    assert sum(verdicts) == 500
    assert time.perf_counter() - started < 60


def test_processes_end_with_the_pool():
    before = set(psutil.Process().children())
    own = judge(f"{HERE}.moody", timeout_s=500.0)
    assert own(["1"], problems("1")) == [1.0]
    started = set(psutil.Process().children()) - before
    assert len(started) == 2
    # One worker is in the middle of a reward.
    own._workers[0].pipe.send(("sleep", problems("1")[0]))
    del own
    gone, alive = psutil.wait_procs(started, timeout=120)
    assert len(gone) == 2 and not alive


def test_without_a_limit_there_are_no_processes():
    before = psutil.Process().children()
    verdicts = judge(f"{HERE}.moody", timeout_s=None)(["1", "raise"], problems("1", "1"))
    assert verdicts[0] == 1.0 and isinstance(verdicts[1].__cause__, ValueError)
    assert psutil.Process().children() == before


@pytest.mark.parametrize("timeout_s", [None, 1.0])
def test_a_reward_that_is_not_there_is_found_out_before_anything_starts(timeout_s):
    with pytest.raises(ConfigError, match=r"reward\.name"):
        judge(f"{HERE}.absent", timeout_s)
