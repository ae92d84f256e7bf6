"""The experts that engines chose, from a vLLM step to a padded batch."""

import numpy as np
import pytest

from nemo_rl_lite.data.problems import Problem, chat
from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion, Request, Sampling
from nemo_rl_lite.generation.vllm.worker import UnfinishedResponse
from nemo_rl_lite.rollout.episode import Episode
from nemo_rl_lite.rollout.rollout import Rollout


def experts(first: int, count: int) -> np.ndarray:
    """Of `count` tokens in two layers: all from `first` on."""
    return np.arange(first, first + count * 4, dtype=np.uint8).reshape(count, 2, 2)


def episode(*turns: tuple[int, int]) -> Episode:
    """A prompt of two tokens; before each further turn a message of one token. A turn has some tokens, and the experts
    of all before its last, from a number on."""
    own = Episode(Problem(chat("what?"), "7"), [1, 2], 2, reward=1.0)
    for number, (length, first) in enumerate(turns):
        if number:
            own.add_messages([8], [{"role": "user", "content": "on"}])
        told = experts(first, len(own.tokens) + length - 1)
        own.add_turn(Completion((5,) * length, (-1.0,) * length, "stop", (0,) * length, told), "")
    return own


def test_a_token_has_the_experts_of_the_turn_that_met_it_first():
    row = episode((2, 0), (3, 100)).row(1.0, 0, experts(0, 0))
    # The first turn has read two tokens of the prompt and one of its own; the second its last one, and what follows.
    assert np.array_equal(row.routed_experts[:3], experts(0, 3))
    assert np.array_equal(row.routed_experts[3:], experts(100, 7)[3:])
    assert len(row.tokens) == 8 and row.routed_experts.dtype == np.uint8


def test_an_episode_without_a_turn_has_no_experts_among_those_that_have():
    rollout = Rollout([episode(), episode((2, 0))], 1, 0)
    rows = rollout.rows([0.0, 1.0], 0)
    assert rows.routed_experts.values.shape == (3, 2, 2)
    assert len(rows[0].routed_experts) == 0 and np.array_equal(rows[1].routed_experts, experts(0, 3))


def test_rows_keep_their_experts_whatever_their_order_and_their_layers():
    rows = Rollout([episode((2, 0)), episode((5, 20)), episode((1, 80))], 1, 0).rows([0.0] * 3, 0)
    shared = rows[1:].routed_experts.values
    assert shared.base is not None and np.array_equal(shared, np.concatenate([experts(20, 6), experts(80, 2)]))
    found = rows.select([2, 0, 2]).with_layers([1])
    assert [one.routed_experts.tolist() for one in found] == [
        experts(first, count)[:, 1:].tolist() for first, count in ((80, 2), (0, 3), (80, 2))
    ]
    swapped = rows.with_layers([1, 0]).routed_experts.values
    assert np.array_equal(swapped, rows.routed_experts.values[:, ::-1])
    assert rows.with_layers([]).routed_experts is None


def test_many_experts_take_two_bytes():
    found = Completion((5,), (-1.0,), "stop", (0,), np.full((3, 2, 2), 300, np.uint16))
    assert found.routed_experts.dtype == np.int16 and (found.routed_experts == 300).all()


def test_where_engines_do_not_tell_rows_have_no_such_field():
    own = Episode(Problem(chat("what?"), "7"), [1, 2], 2, reward=1.0)
    own.add_turn(Completion((5,), (-1.0,), "stop", (0,)), "")
    assert Rollout([own], 1, 0).rows([1.0], 0).routed_experts is None


def completion(told: list[np.ndarray], tokens: list[int]) -> Completion:
    """The response to a prompt of three tokens, when each step of vLLM gives a token, and tells some experts."""
    response = UnfinishedResponse(Request((1, 2, 3), Sampling(1.0, 1.0, None, 8, (), ()), seed=0), None)
    for token, own in zip(tokens, told, strict=True):
        response.routed_experts.append(own)
        response.add([token], [-1.0], ended=False)
    return response.completion("length", 0)


def test_the_experts_of_prompt_and_steps_are_joined():
    found = completion([experts(0, 3), experts(50, 1), experts(70, 1)], [4, 5, 6])
    assert np.array_equal(found.routed_experts, np.concatenate([experts(0, 3), experts(50, 1), experts(70, 1)]))
    # Where a draft was accepted behind the end, there are more.
    assert completion([experts(0, 5)], [4]).routed_experts.shape[0] == 3


def test_an_engine_whose_kernels_record_nothing_is_an_error():
    with pytest.raises(EngineError, match=r"moe_backend=triton, or policy\.router_replay\.enabled=false"):
        completion([np.zeros((3, 2, 2), np.uint8)], [4])
