"""An engine's steps that give one token to each request reach the responses as lists."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from nemo_rl_lite.compat.vllm_scheduler import Samples
from nemo_rl_lite.generation.interface import Decoded, Request, Sampling
from nemo_rl_lite.generation.vllm.worker import UnfinishedResponse, VLLMEngine

PROMPTS = {"0": (1, 2, 3), "1": (4, 5)}


class Detokenizer:
    """Ends a response at token 9."""

    def update(self, tokens, ended):
        return 9 in tokens


@pytest.fixture
def engine():
    """An engine with two unfinished responses, whose core gives what a test puts in `given`."""
    made, aborted = object.__new__(VLLMEngine), []
    core = SimpleNamespace(get_output=lambda: made.given.pop(0), abort_requests=aborted.extend)
    request = {name: Request(prompt, Sampling(1.0, 1.0, None, 9, (), ()), seed=0) for name, prompt in PROMPTS.items()}
    vars(made).update(
        given=[],
        aborted=aborted,
        version=3,
        _engine=SimpleNamespace(engine_core=core),
        _cache=SimpleNamespace(preemptions=0, usage=0.5),
        _unfinished={name: UnfinishedResponse(one, None) for name, one in request.items()},
        _finished={},
        _decoded=Decoded(),
        _batch=None,
        _drafting=None,
    )
    return made


def samples(names, *tokens):
    return Samples(names=names, tokens=list(tokens), logprobs=[-0.5 * one for one in tokens])


def first(name, token):
    return EngineCoreOutput(name, [token], [-0.5 * token])


def tokens(engine):
    return {name: one.tokens.tolist() for name, one in engine._unfinished.items()}


def test_tokens_and_counts_are_those_of_single_outputs(engine):
    names = list(PROMPTS)
    engine.given = [EngineCoreOutputs(outputs=[first("0", 7), first("1", 8)])]
    engine.given += [samples(names, 1, 2), samples(names, 3, 4)]
    for _ in range(3):
        engine.step()
    assert tokens(engine) == {"0": [7, 1, 3], "1": [8, 2, 4]}
    assert engine._unfinished["1"].logprobs.tolist() == [-4, -1, -2]
    # The caches have 3 + 2 tokens of prompts, and one and two of each response.
    assert engine._decoded.steps == 3 and engine._decoded.cached == 7 + 9


def test_a_step_of_other_outputs_between_counts_too(engine):
    names = list(PROMPTS)
    engine.given = [EngineCoreOutputs(outputs=[first("0", 7), first("1", 8)]), samples(names, 1, 2)]
    engine.given += [EngineCoreOutputs(outputs=[first("0", 3), first("1", 4)]), samples(names, 5, 6)]
    for _ in range(4):
        engine.step()
    assert tokens(engine) == {"0": [7, 1, 3, 5], "1": [8, 2, 4, 6]}
    assert engine._decoded.cached == 7 + 9 + 11


def test_requests_that_end_or_leave_begin_another_list(engine):
    engine.given = [samples(["0", "1"], 7, 8)]
    engine.given += [EngineCoreOutputs(outputs=[EngineCoreOutput("0", [2], [-1.0], finish_reason=FinishReason.LENGTH)])]
    engine.given += [samples(["1"], 5)]
    engine.step()
    finished = engine.step()
    assert finished[0].tokens.tolist() == [7, 2] and finished[0].versions == ((3, 2),)
    engine.step()
    assert tokens(engine) == {"1": [8, 5]}


def test_aborted_requests_get_no_tokens(engine):
    engine.abort([0])
    engine.given = [samples(["0", "1"], 7, 8)]
    engine.step()
    assert tokens(engine) == {"1": [8]}


def test_stop_strings_are_found(engine):
    engine._unfinished["0"].detokenizer, engine._unfinished["0"].is_plain = Detokenizer(), False
    names = list(PROMPTS)
    engine.given = [samples(names, 7, 8), samples(names, 9, 2)]
    assert not engine.step()
    finished = engine.step()
    assert finished[0].tokens.tolist() == [7, 9] and finished[0].finish_reason == "stop"
    assert tokens(engine) == {"1": [8, 2]} and engine.aborted == ["0"]
