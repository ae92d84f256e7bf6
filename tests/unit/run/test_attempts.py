"""Reactions to a worker's error: restart and keep the engines, restart everything elsewhere, or end."""

from types import SimpleNamespace

import pytest

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.run import run as run_module
from nemo_rl_lite.run.run import _Attempts

LOST = WorkerError("policy rank 1", "train", "the process died", lost=True)
HUNG = WorkerError("policy rank 0, policy rank 1", "train", "not done within 600 s", is_transient=True)
OF_START = WorkerError("policy rank 1", "start", "RuntimeError: CUDA error: unknown error")
OF_CODE = WorkerError("policy rank 1", "train", "ValueError: a per cent sign")


@pytest.fixture
def attempts(monkeypatch):
    """A run that may restart twice without a new step. `errors` has the step and the error of each attempt."""
    here = SimpleNamespace(step=0, errors=[], began=[], said=[], again=lambda begun: f"{begun}, again")
    config = SimpleNamespace(cluster=SimpleNamespace(max_restarts=2))
    whole = _Attempts(config, "folder", {}, SimpleNamespace(say=here.said.append), None)  # pyrefly: ignore

    def run(start):
        begun = whole._begun or SimpleNamespace(generation="engines", config=SimpleNamespace(generation="given"))
        here.began.append("engines" if whole._begun else whole._avoided[:])
        whole._begun = begun
        here.step, error = here.errors.pop(0) if here.errors else (here.step, None)
        if error is not None:
            raise error
        return "the summary"

    monkeypatch.setattr(whole, "_run", run)
    monkeypatch.setattr(run_module, "latest_progress", lambda: {"step": here.step})
    monkeypatch.setattr(run_module, "begin_again", lambda begun, _: here.again(begun) and begun)
    monkeypatch.setattr(run_module, "_find_start", lambda *_: SimpleNamespace(policy="the checkpoint"))
    monkeypatch.setattr(run_module, "nodes_of", lambda workers: [f"node of {one}" for one in workers])
    here.within_budget = lambda given, folder: given
    monkeypatch.setattr(run_module, "within_budget", lambda *given: here.within_budget(*given))
    monkeypatch.setattr(run_module, "lost_process", str)
    monkeypatch.setattr(run_module, "was_asked_to_end", lambda: False)
    here.until_done = lambda: whole.until_done(SimpleNamespace(policy=None))  # pyrefly: ignore
    return here


@pytest.mark.parametrize("error", [LOST, HUNG])
def test_the_first_restart_in_a_step_keeps_the_engines(attempts, error):
    attempts.errors = [(3, error), (4, error), (7, error)]
    assert attempts.until_done() == "the summary"
    assert attempts.began == [[], *["engines"] * 3]


def test_engines_that_are_above_the_mismatch_budget_restart_too(attempts):
    attempts.errors, attempts.within_budget = [(3, LOST)], lambda given, folder: "plain"
    assert attempts.until_done() == "the summary"
    assert len(attempts.began) == 2 and attempts.began[1] != "engines"


def test_a_restart_in_vain_is_followed_by_one_of_everything_on_other_nodes(attempts):
    attempts.errors = [(3, LOST), (3, OF_START)]
    assert attempts.until_done() == "the summary"
    assert attempts.began == [[], "engines", ["node of policy rank 1"]]
    assert "restart 2 of at most 2 without a new step" in attempts.said[-1]


def test_engines_that_do_not_answer_restart_too(attempts):
    def refuse(begun):
        raise WorkerError("generation rank 0", "clear", "not done within 60 s")

    attempts.again, attempts.errors = refuse, [(3, HUNG)]
    assert attempts.until_done() == "the summary"
    assert attempts.began == [[], ["node of policy rank 0", "node of policy rank 1"]]
    assert "the engines restart too: worker error: generation rank 0" in attempts.said[-1]


@pytest.mark.parametrize("errors", [[(0, OF_START)], [(3, OF_CODE)], [(3, LOST), (4, OF_CODE)], [(3, LOST)] * 3])
def test_errors_that_a_restart_would_not_help_end_the_run(attempts, errors):
    attempts.errors = [*errors, (99, LOST)]
    with pytest.raises(WorkerError) as caught:
        attempts.until_done()
    assert caught.value is errors[-1][1] and attempts.errors == [(99, LOST)]
