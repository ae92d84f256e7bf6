"""The time limit of a reward holds, and a late reward costs one sample only."""

import asyncio
import json
import os
import subprocess
import sys
import time
from multiprocessing import Pipe

import psutil
import pytest

from nemo_rl_lite.config.schema import RewardConfig, RewardTerm
from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import ConfigError
from nemo_rl_lite.rewards.judge import RewardResult, Term, make_judge, try_reward

HERE = "tests.unit.rewards.test_judge"


def moody(response: str, answer: str) -> float:
    """A reward that can fail in every way."""
    if response == "power":
        return float(len(str(7**7**9)))  # one step of C code, which no signal handler of Python interrupts
    if response == "sleep":
        time.sleep(600)
    if response == "raise":
        raise ValueError("x" * 5000)
    if response == "exit":
        sys.exit(0)
    if response == "die":
        os._exit(7)
    if response == "fork" and os.fork() == 0:
        time.sleep(600)
    if response == "fork and return":
        # Both return, and the copy must not answer.
        os.fork()
    if response == "fork and die":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
    if response == "leave one behind":
        os.system("sleep 600 &")
    return float(response == answer)


def config(
    name: str,
    timeout_s: float | None,
    processes: int = 2,
    concurrency: int = 1,
    batch_size: int | None = None,
    kwargs: dict | None = None,
    **terms,
) -> RewardConfig:
    return RewardConfig(
        name=name,
        kwargs=kwargs or {},
        binary=None,
        batch_size=batch_size,
        terms={label: RewardTerm(**one) for label, one in terms.items()},
        timeout_s=timeout_s,
        processes=processes,
        concurrency=concurrency,
        max_failure_fraction=0.5,
    )


def one_judge(name: str, timeout_s: float | None, processes: int = 2):
    return make_judge(config(name, timeout_s, processes))


def judge(name: str, timeout_s: float | None, processes: int = 2):
    """Judges many samples at a time."""
    one = one_judge(name, timeout_s, processes)

    async def all_of(responses, problems):
        found = await asyncio.gather(*(one(*pair) for pair in zip(responses, problems, strict=True)))
        return [verdict.reward if isinstance(verdict, RewardResult) else verdict for verdict in found]

    return lambda responses, problems: asyncio.run(all_of(responses, problems))


def problems(*answers: str) -> list[Problem]:
    return [Problem(chat("?"), answer) for answer in answers]


def test_a_sample_that_hangs_is_an_error_and_the_others_get_their_verdict():
    moody_judge = judge(f"{HERE}.moody", timeout_s=3.0)
    responses = ["1", "power", "2", "raise", "sleep", "3", "die", "9"]
    started = time.perf_counter()
    verdicts = moody_judge(responses, problems(*"12345678"))
    assert time.perf_counter() - started < 200
    assert [verdict for verdict in verdicts if isinstance(verdict, float)] == [1.0, 0.0, 0.0, 0.0]
    late = "no answer within reward.timeout_s = 3"
    assert str(verdicts[1]) == str(verdicts[4]) == late
    assert str(verdicts[3]).startswith("ValueError: xxx") and len(str(verdicts[3])) < 400
    assert str(verdicts[6]) == "the reward's process ended with status 7"
    assert moody_judge(["5", "6"], problems("5", "5")) == [1.0, 0.0], "the pool survives"


def test_a_rollout_is_judged_fast_but_for_a_number_that_no_computer_can_hold():
    math_judge = judge("math", timeout_s=1.5)
    verdicts = math_judge(["$9^{9^{9^9}}$", "\\boxed{4}"], problems("42", "4"))
    assert verdicts == [0.0, 1.0]
    started = time.perf_counter()
    verdicts = math_judge([f"3 * {i} is {3 * i}" for i in range(500)], problems(*(str(3 * i) for i in range(500))))
    assert sum(verdicts) == 500
    assert time.perf_counter() - started < 60


def test_what_a_reward_starts_neither_hangs_the_run_nor_outlives_it(monkeypatch, tmp_path):
    monkeypatch.setenv("NEMO_RL_LITE_TEST_POOL", str(tmp_path))
    pool = judge(f"{HERE}.moody", timeout_s=2.0)
    responses = ["fork", "y", "1", "fork and die", "leave one behind", "fork and return", "2", "3"]
    started = time.perf_counter()
    verdicts = pool(["fork and die", *responses], problems("?", *"xx1xxx23"))
    assert time.perf_counter() - started < 60
    assert str(verdicts[0]) == str(verdicts[4]) == "the reward's process ended with status 7"
    assert verdicts[1:4] == [0.0, 0.0, 1.0] and verdicts[5:] == [0.0, 0.0, 1.0, 1.0]
    (late,) = pool(["sleep"], problems("?"))
    assert str(late) == "no answer within reward.timeout_s = 2"
    assert pool(["4", "5"], problems(*"45")) == [1.0, 1.0]
    del pool
    deadline = time.monotonic() + 15
    while (left := processes_of(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def processes_of(mark: str) -> list[psutil.Process]:
    """Living processes with the environment of a pool, except for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.pid != os.getpid() and process.environ().get("NEMO_RL_LITE_TEST_POOL") == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def trl_reward(response: str, answer: str) -> list[float]:
    return [1.0] * len(response)


def fails_on_some(response: str, answer: str) -> float:
    raise ValueError(response)


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_trial_call_finds_what_is_no_reward(timeout_s, capsys):
    with pytest.raises(ConfigError, match=r"(?s)reward.name.*trl_reward returned \[1.0, 1.0\], a list.*'42' to '\?'"):
        try_reward(one_judge(f"{HERE}.trl_reward", timeout_s), problems("42")[0])
    assert capsys.readouterr().err == ""
    # It may have no answer to this response alone.
    try_reward(one_judge(f"{HERE}.fails_on_some", timeout_s), problems("42")[0])
    place = f"test_judge.py, line {fails_on_some.__code__.co_firstlineno + 1}"
    told = f"note: a trial call of the reward failed: ValueError: 42 ({place}); samples without a reward are left out\n"
    assert capsys.readouterr().err == told


def parses(response: str, answer: str) -> float:
    return float(json.loads(response)["answer"] == answer)


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_an_error_names_the_line_of_the_users_file_and_keeps_its_traceback(timeout_s):
    (error,) = judge(f"{HERE}.parses", timeout_s)(["no JSON"], problems("1"))
    assert f"(test_judge.py, line {parses.__code__.co_firstlineno + 1})" in str(error)
    assert "in parses" in error.details and "JSONDecodeError" in error.details


@pytest.mark.parametrize("is_told", [False, True])
def test_a_judging_process_ends_quietly_when_the_launcher_is_gone(is_told):
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "nemo_rl_lite.system.pool_process", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    theirs.close()
    if is_told:
        kept = {"terms": [Term("moody", f"{HERE}.moody", {}, 1.0, "reward")]}
        ours.send((sys.path, "nemo_rl_lite.rewards.judge.RewardCalls", kept, 1))
    ours.close()
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


all_called = asyncio.Barrier(16)


async def slowly(response: str, answer: str) -> float:
    """Wait for the other calls of this process."""
    async with asyncio.timeout(60):
        await all_called.wait()
    if response == "raise":
        raise ValueError("no")
    return float(response == answer)


def length(response: str, answer: str, unit: int = 1) -> float:
    return len(response) / unit


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_rewards_may_be_coroutines_of_which_a_process_has_many(timeout_s):
    one = make_judge(config(f"{HERE}.slowly", timeout_s, processes=1, concurrency=16))

    async def judge_all():
        said = ["1"] * 15 + ["raise"]
        return await asyncio.gather(*(one(text, problems("1")[0]) for text in said))

    verdicts = asyncio.run(judge_all())
    assert verdicts[:15] == [RewardResult(1.0)] * 15 and "ValueError: no" in str(verdicts[15])


def test_terms_are_added_with_their_weights_and_keep_their_names():
    terms = {
        "size": {"name": f"{HERE}.length", "weight": -0.5, "kwargs": {"unit": 2}},
        "tags": {"name": "format", "weight": 2.0, "kwargs": {"pattern": "a.*"}},
    }
    judge_sum = make_judge(config("exact_match", None, **terms))
    verdict = asyncio.run(judge_sum("ab", problems("ab")[0]))
    assert verdict == RewardResult(1 - 0.5 * 1 + 2.0, {"exact_match": 1.0, "size": 1.0, "tags": 1.0})
    # One that fails is the failure of all.
    failing = make_judge(config("exact_match", None, moody={"name": f"{HERE}.moody", "weight": 1.0}))
    assert str(asyncio.run(failing("raise", problems("1")[0]))).startswith("ValueError")


def test_a_response_that_takes_for_ever_is_wrong_where_no_other_reward_is_late_with_it():
    endless, problem = "$9^{9^{9^9}}$", problems("42")[0]
    style = {"name": "format", "weight": 2.0, "kwargs": {"pattern": ".*"}}
    verdict = asyncio.run(make_judge(config("math", 1.0, style=style))(endless, problem))
    assert verdict.reward == 0.0 and verdict.parts == {"math": 0.0, "style": 0.0}
    assert str(verdict.late) == "no answer within reward.timeout_s = 1"
    size = {"name": f"{HERE}.length", "weight": 1.0}
    verdict = asyncio.run(make_judge(config("math", 1.0, size=size))(endless, problem))
    assert str(verdict) == "no answer within reward.timeout_s = 1"
