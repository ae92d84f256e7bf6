"""What comes between steps."""

import os
import signal
import time
from contextlib import nullcontext

import pytest

from nemo_rl_lite.algorithms.loop import Steps, ValidationTimes
from nemo_rl_lite.checkpoint.store import Checkpoints, CheckpointStore, Retention
from nemo_rl_lite.errors import CallbackError, RunStopped, TrainingError
from nemo_rl_lite.observability.callbacks import Callbacks
from nemo_rl_lite.observability.trackers import MetricsLog
from nemo_rl_lite.system.stopping import Stopping, obey_request, request_end

OFTEN, NEVER = ValidationTimes(2, at_start=True, at_end=True), ValidationTimes(0, at_start=False, at_end=False)


class Policy:
    def begin_save(self, folder): ...

    def save_is_written(self):
        return True

    def finish_save(self):
        return {}


@pytest.fixture
def steps(tmp_path):
    store = CheckpointStore(tmp_path, Retention(9, 0, "accuracy", True))
    checkpoints = Checkpoints(store, Policy(), 3, True, {}, print)
    return Steps(0, checkpoints, Stopping(None, time.monotonic), MetricsLog([]), 2, lambda step: nullcontext())


def take(steps, total, times, during=lambda step: None):
    """Numbers of the steps taken, and of those validated after."""
    taken, validated = [], []

    def validate(step):
        validated.append(step)
        return {"accuracy": step / 10}

    for step in steps.until(total, times, validate, lambda: None):
        taken.append(step)
        steps.checkpoints.save_if_due(step, step == total)
        during(step)
    return taken, validated


def test_validation_comes_before_after_and_between(steps):
    assert take(steps, 5, OFTEN) == ([1, 2, 3, 4, 5], [0, 2, 4, 5])
    found = {one.step: one.metrics for one in steps.checkpoints.store.complete()}
    assert found == {3: {}, 5: {"accuracy": 0.5}}


def test_a_run_that_goes_on_validates_what_was_not_validated_before(steps):
    steps.done = 2
    assert take(steps, 4, OFTEN) == ([3, 4], [2, 4])
    steps.done = 4
    steps.metrics.log(4, {"validation/accuracy": 0.4})
    assert take(steps, 4, OFTEN) == ([], [])
    assert take(steps, 5, NEVER) == ([5], [])


@pytest.mark.parametrize("answer", [True, "stop"])
def test_a_callback_sees_each_step_and_ends_the_run_as_a_complete_one(steps, answer):
    seen = []

    def on_step(metrics):
        seen.append(metrics)
        return answer if metrics["step"] == 2 else metrics["train/loss"]

    def during(step):
        steps.metrics.log(step, {"train/loss": 1.0})
        steps.metrics.log(step, {"timing/train/generation": 2.0})

    steps.callbacks = Callbacks(on_step)
    at_the_end = ValidationTimes(0, at_start=False, at_end=True)
    assert take(steps, 5, at_the_end, during) == ([1, 2], [2])
    assert seen == [{"step": step, "train/loss": 1.0, "timing/train/generation": 2.0} for step in (1.0, 2.0)]
    steps.checkpoints.finish()
    assert [(one.step, one.metrics) for one in steps.checkpoints.store.complete()] == [(2, {"accuracy": 0.2})]


def test_a_run_is_stopped_from_elsewhere_and_needs_no_checkpoint(steps, tmp_path):
    steps.callbacks = Callbacks()
    steps.checkpoints = Checkpoints(steps.checkpoints.store, Policy(), 0, True, {}, print)
    taken, _ = take(steps, 5, NEVER, during=lambda step: steps.callbacks.stop() if step == 3 else None)
    assert taken == [1, 2, 3] and not steps.checkpoints.store.complete()


def test_an_error_of_a_callback_names_it_and_its_line(steps):
    steps.callbacks = Callbacks(lambda metrics: 1 / 0)
    with pytest.raises(CallbackError, match=r"on_step raised ZeroDivisionError.*\(test_steps.py, line \d+\)") as error:
        take(steps, 5, NEVER, during=lambda step: steps.metrics.log(step, {"train/loss": 1.0}))
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(steps):
    def during(step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(RunStopped, match=r"stopped after step 2 of 9: SIGUSR1 .* give the same command") as stopped:
        take(steps, 9, NEVER, during)
    assert stopped.value.exit_status == 75
    assert steps.checkpoints.store.latest().step == 2


@pytest.mark.parametrize("period", [3, 0])
def test_a_request_ends_the_run_after_the_step_with_a_checkpoint_in_any_case(steps, tmp_path, period):
    steps.checkpoints = Checkpoints(steps.checkpoints.store, Policy(), period, True, {}, print)

    def during(step):
        if step == 2:
            request_end(tmp_path)
            obey_request(tmp_path)

    with pytest.raises(RunStopped, match="stopped after step 2 of 9: nrl-lite stop asked for it"):
        take(steps, 9, NEVER, during)
    assert steps.checkpoints.store.latest().step == 2


def test_too_many_skipped_steps_in_a_row_end_the_run(steps):
    skipped = {1: 1.0, 2: 0.5, 3: 1.0, 4: 1.0}
    with pytest.raises(TrainingError, match=r"2 consecutive steps .*policy\.max_skipped_steps"):
        take(steps, 9, NEVER, lambda step: steps.metrics.log(step, {"train/skipped_steps": skipped[step]}))
    assert steps.metrics.series("train/skipped_steps")[0] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("metrics", "warned"),
    [
        ({"train/grad_norm": 0.0}, True),
        ({"train/grad_norm": 0.0, "train/advantages/max": 1.0, "train/advantages/min": -1.0}, True),
        ({"train/grad_norm": 0.0, "train/advantages/max": 0.0, "train/advantages/min": 0.0}, False),
        ({"train/grad_norm": 1e-9}, False),
    ],
)
def test_gradients_that_are_all_0_are_told_once(steps, caplog, metrics, warned):
    take(steps, 3, NEVER, lambda step: steps.metrics.log(step, metrics))
    assert caplog.text.count("all gradients are exactly 0") == warned
