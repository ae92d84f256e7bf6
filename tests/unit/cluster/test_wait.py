"""Which of several workers' failures is reported."""

import pickle
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from nemo_rl_lite.cluster import calls, heartbeat
from nemo_rl_lite.cluster.calls import Call, wait
from nemo_rl_lite.cluster.heartbeat import Heartbeat
from nemo_rl_lite.cluster.limits import PhaseLimits
from nemo_rl_lite.errors import LostTouchError, RefitError, WorkerError

POLICY, ENGINE = "policy rank 0", "generation rank 0"
CALLS = [Call((POLICY,), "refit", ("lends",)), Call((ENGINE,), "refit", ("copies",))]


@pytest.fixture
def raised(monkeypatch):
    """What each call has raised, by its reference; the others go on."""
    raised: dict[str, Exception] = {}

    def get(reference: str) -> None:
        error = raised.pop(reference)
        raise error if isinstance(error, RayError) else RayTaskError("call", f"the traceback of {reference}", error)

    def first_done(pending: list[str], num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        done = [reference for reference in pending if reference in raised][:1]
        return done, [reference for reference in pending if reference not in done]

    monkeypatch.setattr(calls, "ray", SimpleNamespace(get=get, wait=first_done))
    monkeypatch.setattr(heartbeat, "last_heartbeats", lambda workers: [])
    return raised


def test_an_engines_own_error_is_told_although_the_policy_waits_for_it(raised):
    raised["copies"] = RefitError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(WorkerError) as caught:
        wait(*CALLS)
    assert caught.value.worker == ENGINE and caught.value.cause.startswith("RefitError: cuIpcOpenMemHandle_v2")
    assert "the traceback of copies" in caught.value.details and caught.value.others_running


def test_one_that_goes_on_is_named_beside_the_traceback_of_one_that_gave_up(raised):
    raised["copies"] = LostTouchError("rank 1 could not broadcast the plan's hash")
    with pytest.raises(WorkerError) as caught:
        wait(*CALLS)
    assert caught.value.worker == POLICY and f"it is still running, and worker error: {ENGINE} failed" in str(
        caught.value
    )
    assert "the traceback of copies" in caught.value.details


def test_a_restart_may_help_a_lost_connection_but_not_in_a_start(raised):
    for phase, helps in (("refit", True), ("start", False)):
        raised["copies"] = LostTouchError("rank 1 could not broadcast the plan's hash")
        with pytest.raises(WorkerError) as caught:
            wait(Call((ENGINE,), phase, ("copies",)))
        assert caught.value.is_transient == helps and not caught.value.lost
        assert pickle.loads(pickle.dumps(caught.value)).is_transient == helps


@pytest.mark.parametrize(
    ("text", "helps"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", True),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_a_restart_may_help_a_broken_gpu_but_not_code(raised, text, helps):
    raised["copies"] = RuntimeError(text)
    with pytest.raises(WorkerError) as caught:
        wait(Call((POLICY,), "train", ("copies",)))
    assert caught.value.is_transient == helps


def test_a_process_that_ray_ended_for_its_memory_is_told_with_the_figures(raised):
    raised["copies"] = OutOfMemoryError("Task was killed due to the node running low on memory.\n22.9GB / 23.5GB used")
    with pytest.raises(WorkerError, match=r"running low on memory\. 22.9GB / 23.5GB used") as caught:
        wait(*CALLS)
    assert caught.value.worker == ENGINE and not caught.value.lost


def measured(limits: PhaseLimits, phase: str, *seconds: float) -> PhaseLimits:
    for one in seconds:
        limits.note(phase, one)
    return limits


@pytest.mark.parametrize(
    ("phase", "seconds", "hang_s", "slow_s"),
    [
        ("train", [], 3600, None),
        ("train", [5.0] * 19, 3600, None),
        ("train", [5.0] * 20, 600, 120),
        ("train", [5.0] * 20 + [100.0], 1000, 300),
        ("train", [5.0] * 20 + [3000.0], 3600, 9000),
        # It may have to wait for a file system.
        ("checkpoint", [5.0] * 20, 3600, None),
    ],
)
def test_a_phase_hangs_after_many_times_its_longest_call_and_after_minutes(phase, seconds, hang_s, slow_s):
    limits = measured(PhaseLimits(3600.0), phase, *seconds)
    assert (limits.hang_s(phase), limits.slow_s(phase)) == (hang_s, slow_s)
    without = measured(PhaseLimits(None), phase, *seconds)
    assert (without.hang_s(phase), without.slow_s(phase)) == (None, slow_s)


def test_a_slow_call_is_a_warning_with_the_stack_and_its_end_is_counted(raised, monkeypatch, caplog):
    limits = measured(PhaseLimits(3600.0), "train", *[1.0] * 20)
    beat = Heartbeat(POLICY, "train", since=0.0, at=time.time(), stack=("loss.py:7 own_loss",))
    monkeypatch.setattr(heartbeat, "last_heartbeats", lambda workers: [beat])
    call = Call((POLICY,), "train", ("waits",), 3600.0, limits, began=time.monotonic() - 200)
    answers = iter([([], ["waits"]), (["waits"], [])])
    monkeypatch.setattr(calls, "ray", SimpleNamespace(get=len, wait=lambda *_, **__: next(answers)))
    assert wait(call) == [5]
    (warning,) = caplog.messages
    assert f"train: {POLICY} is unusually slow" in warning and "loss.py:7 own_loss" in warning
    assert limits.slow_s("train") > 500
