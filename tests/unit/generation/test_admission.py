"""The requests that an engine takes follow from its load and from the lengths of others."""

import pytest

from nemo_rl_lite.generation.admission import Admission, ResponseLengths
from nemo_rl_lite.generation.interface import EngineLoad


def load(running: int, tokens: int, waiting: int = 0, preempted: int = 0) -> EngineLoad:
    """`running` requests of `tokens` tokens each, in a cache of 100,000."""
    return EngineLoad(0, running, waiting, running * tokens, running * tokens / 100_000, preempted)


def admission(ended: int = 0, most: int = 64) -> Admission:
    """The admission after conversations of `ended` tokens, if any ended."""
    own = Admission(most)
    for _ in range(10 if ended else 0):
        own.end(ended)
    return own


def test_an_engine_takes_all_requests_before_anything_is_known():
    assert admission().capacity(EngineLoad()) == 64 and admission(ended=900).capacity(EngineLoad()) == 64


def test_an_engine_without_a_known_cache_takes_all():
    assert admission(ended=90_000).capacity(EngineLoad(500, 8, 100, 0, 0.0, 0)) == 64


@pytest.mark.parametrize("count", [1, 20, 64])
def test_short_responses_are_never_held_back(count):
    """64 x 2,000 tokens are more than the cache has, but half of them have not been sampled on average."""
    assert admission(ended=2_000).capacity(load(count, 1_000)) == 64


def test_requests_count_half_of_what_finished_ones_had_and_no_less_than_they_have():
    own = admission(ended=20_000)
    # 95,000 tokens are nine times 10,000.
    assert own.capacity(load(2, 100)) == 9
    assert own.capacity(load(4, 10_000)) == 9
    # 15,000 tokens are left.
    assert own.capacity(load(4, 20_000)) == 5
    # What an idle engine takes next.
    assert own.capacity(EngineLoad()) == 9


def test_an_engine_that_preempts_or_is_full_takes_no_more():
    own = admission(ended=100)
    assert own.capacity(load(20, 1_000, preempted=1)) == 20
    assert own.capacity(load(20, 4_800, waiting=3)) == 19
    # Prompts that wait for their prefill need no room.
    assert own.capacity(load(20, 1_000, waiting=3)) == 64


def test_it_grows_again_as_requests_finish():
    own = admission(ended=20_000)
    found = [own.capacity(load(count, 20_000, preempted=count == 6)) for count in (6, 4, 2)]
    assert found == [4, 5, 7]


def test_conversations_between_turns_need_their_tokens():
    own = admission(ended=20_000)
    own.capacity(load(2, 10_000))
    assert own.capacity(load(2, 10_000), [10_000] * 4) == 8
    assert own.capacity(load(2, 10_000), [20_000] * 4) == 5
    assert own.capacity(EngineLoad(), [40_000] * 4) == 2


def test_a_response_is_expected_to_be_as_long_as_earlier_ones_to_its_prompt():
    lengths = ResponseLengths()
    assert lengths.expected(1) == 0.0
    for tokens in (100, 300):
        lengths.note(1, tokens)
    lengths.note(2, 800)
    assert lengths.expected(1) == 200.0 and lengths.expected(2) == 800.0 and lengths.expected(3) == 400.0


def test_lengths_follow_a_policy_whose_responses_grow():
    lengths = ResponseLengths()
    for tokens in [100] * 64 + [1_000] * 64:
        lengths.note(1, tokens)
    assert lengths.expected(1) > 950


def test_the_oldest_prompts_are_forgotten(monkeypatch):
    monkeypatch.setattr("nemo_rl_lite.generation.admission._PROMPTS", 2)
    lengths = ResponseLengths()
    for prompt, tokens in [(1, 10), (2, 20), (1, 10), (3, 30)]:
        lengths.note(prompt, tokens)
    assert lengths.expected(1) == 10.0 and lengths.expected(3) == 30.0 and lengths.expected(2) == 17.5
