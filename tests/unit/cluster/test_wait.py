"""Which of several workers' failures is reported."""

from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from nemo_rl_lite.cluster import calls, heartbeat
from nemo_rl_lite.cluster.calls import Call, wait
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


def test_a_process_that_ray_ended_for_its_memory_is_told_with_the_figures(raised):
    raised["copies"] = OutOfMemoryError("Task was killed due to the node running low on memory.\n22.9GB / 23.5GB used")
    with pytest.raises(WorkerError, match=r"running low on memory\. 22.9GB / 23.5GB used") as caught:
        wait(*CALLS)
    assert caught.value.worker == ENGINE and not caught.value.lost
