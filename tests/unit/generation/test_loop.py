"""An engine's loop: it works without being asked, and its thread does what others ask for between two steps."""

import threading
import time

import pytest

from nemo_rl_lite.generation.interface import Completion, Decoded, EngineLoad, Request, Sampling, Unfinished
from nemo_rl_lite.generation.loop import EngineLoop
from nemo_rl_lite.observability.liveness import background_work

SAMPLING = Sampling(1.0, 1.0, None, 100, (), ())


def request(length: int, **options: bool) -> Request:
    return Request((0, length), SAMPLING, length, **options)


class Engine:
    """Samples a token of each request in a step of a millisecond."""

    def __init__(self):
        self.held, self.calls, self.threads, self.error = {}, [], {threading.get_ident()}, None
        self.has_weights = True
        self.goes = threading.Event()
        self.goes.set()

    def submit(self, requests):
        assert self.has_weights
        self.threads.add(threading.get_ident())
        if any(one.prompt[1] < 0 for one in requests.values()):
            raise ValueError("a negative length")
        self.held |= {number: [one, 0, 0] for number, one in requests.items()}

    def abort(self, numbers):
        for number in numbers:
            self.held.pop(number, None)

    def step(self):
        self.goes.wait(20)
        time.sleep(0.001)
        if self.error:
            raise self.error
        for own in self.held.values():
            own[1] += 1
        done = [number for number, (one, tokens, _) in self.held.items() if tokens == one.prompt[1]]
        return {number: answer(self.held.pop(number)[1]) for number in done}

    def new_tokens(self, of_all):
        found = {}
        for number, own in self.held.items():
            one, tokens, told = own
            if tokens > told and (one.streams or (of_all and one.continues)):
                found[number], own[2] = answer(tokens - told, Unfinished), tokens
        return found

    def load(self):
        return EngineLoad(running=len(self.held), preempted=1)

    def take_decoded(self):
        return Decoded(3)

    def receive_weights(self, version):
        self.calls.append((version, dict(self.held)))
        self.threads.add(threading.get_ident())
        return version

    def fails(self):
        raise ValueError("a failing call")


def answer(tokens: int, kind=Completion):
    return kind((7,) * tokens, (-1.0,) * tokens, "stop", (0,) * tokens)


def collected(loop: EngineLoop, count: int) -> dict[int, Completion]:
    found, ends = {}, time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < ends
        found |= {n: one for n, one in loop.report().finished.items() if not isinstance(one, Unfinished)}
    return found


def until(condition) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_it_works_while_nobody_asks():
    loop = EngineLoop(Engine)
    loop.send({1: request(5), 2: request(9)})
    loop.call("load")
    until(lambda: not loop.engine.held)
    assert loop.take_decoded().seconds >= 9e-3
    report = loop.report(0)
    assert {number: len(one.tokens) for number, one in report.finished.items()} == {1: 5, 2: 9}
    # The preemptions are those since the last report.
    assert (report.steps, report.load.preempted, report.stuck_s) == (9, 9, 0.0)
    assert loop.report().load.preempted == 0
    assert len(loop.engine.threads) == 1 and threading.get_ident() not in loop.engine.threads


def test_a_report_waits_for_news_and_not_without_requests():
    loop = EngineLoop(Engine)
    began = time.monotonic()
    assert not loop.report(90).finished and time.monotonic() - began < 60
    loop.send({1: request(30)})
    assert list(loop.report(20).finished) == [1]


def test_a_pause_is_acknowledged_with_its_step_and_keeps_requests():
    loop = EngineLoop(Engine)
    loop.send({1: request(100)})
    until(lambda: loop.report(0).steps > 3)
    steps = loop.pause()
    loop.send({2: request(1)})
    assert loop.call("receive_weights", 7) == 7
    time.sleep(0.01)
    assert loop.report(0).steps == steps
    [(version, held)] = loop.engine.calls
    assert version == 7 and {*held} == {1, 2} and held[1][1] == steps
    loop.resume()
    assert {*collected(loop, 2)} == {1, 2}


def test_what_is_aborted_is_not_reported_even_if_it_was_done():
    loop = EngineLoop(Engine)
    loop.send({1: request(10**6), 2: request(1), 3: request(20)})
    until(lambda: 2 not in loop.engine.held)
    loop.send({}, [1, 2])
    assert [*collected(loop, 1)] == [3]
    assert not loop.engine.held and not loop.report(20).finished


def test_an_engine_without_weights_may_be_cleared():
    loop = EngineLoop(Engine)
    loop.engine.has_weights = False
    loop.clear()
    assert not loop.report(20).finished
    loop.engine.has_weights = True
    loop.send({1: request(10**6)})
    loop.clear()
    assert loop.call("load").running == 0


def reported(loop: EngineLoop, *numbers: int) -> dict[int, list[Completion]]:
    """Collect what reports bring of each request up to its completion."""
    found = {number: [] for number in numbers}
    while not all(own and not isinstance(own[-1], Unfinished) for own in found.values()):
        for number, one in loop.report(20).finished.items():
            found[number].append(one)
    return found


def test_reports_have_the_new_tokens_of_a_stream():
    loop = EngineLoop(Engine)
    loop.send({1: request(200, streams=True), 2: request(100)})
    found = reported(loop, 1, 2)
    *parts, whole = found[1]
    assert len(parts) > 2 and 0 < sum(len(one.tokens) for one in parts) < len(whole.tokens) == 200
    assert len(found[2]) == 1


def test_some_reports_have_the_new_tokens_of_requests_that_continue(monkeypatch):
    monkeypatch.setattr("nemo_rl_lite.generation.loop.TOKENS_S", 0.05)
    loop = EngineLoop(Engine)
    loop.send({1: request(300, continues=True), 2: request(300)})
    found = reported(loop, 1, 2)
    *parts, whole = found[1]
    joined = Unfinished.joined(parts)
    assert len(parts) > 1 and joined.versions == ((0, len(joined.tokens)),)
    assert len(found[2]) == 1 and whole == answer(300)


@pytest.mark.parametrize("fault", ["step", "submit"])
def test_the_end_of_its_loop_is_told_to_all(fault):
    loop = EngineLoop(Engine)
    if fault == "step":
        loop.engine.error = ValueError("a failing step")
    loop.send({1: request(3 if fault == "step" else -1)})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a failing step|a negative length"):
            loop.report(20)
        with pytest.raises(ValueError, match=r"a failing step|a negative length"):
            loop.call("receive_weights", 1)


def test_an_error_of_a_call_is_its_callers_alone():
    loop = EngineLoop(Engine)
    loop.send({1: request(50)})
    with pytest.raises(ValueError, match="a failing call"):
        loop.call("fails")
    assert [*collected(loop, 1)] == [1]


def test_an_engine_that_cannot_be_made_says_why():
    def make():
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        EngineLoop(make)


def test_a_step_that_does_not_end_is_seen():
    loop = EngineLoop(Engine)
    loop.engine.goes.clear()
    loop.send({1: request(1)})
    until(lambda: loop.report(0).stuck_s > 0.02)
    work = background_work()
    assert work is not None and work.phase == "generate" and work.thread in loop.engine.threads
    loop.engine.goes.set()
    assert [*collected(loop, 1)] == [1]
    until(lambda: not work.phase)
