"""A KV cache that is too small for its requests, and the caches of conversations, in a real engine."""

import pickle
from pathlib import Path

import pytest

from tests.functional.ranks import run_script

pytestmark = [pytest.mark.functional, pytest.mark.slow]


@pytest.fixture(scope="module")
def seen(model_folder, engine_environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    script = Path(__file__).with_name("cache_process.py")
    run_script(script, [model_folder, folder / "seen"], engine_environment, folder / "log")
    return pickle.loads((folder / "seen").read_bytes())


def test_requests_that_fit_are_preempted_less_and_have_the_same_tokens(seen):
    (tokens, unaware), (first_tokens, first), (second_tokens, second) = (
        seen[name] for name in ("unaware", "first", "second")
    )
    assert tokens == first_tokens == second_tokens
    assert seen["headroom"] == 2
    # Nothing is known of the first requests' lengths.
    assert unaware.preemptions >= first.preemptions > second.preemptions
    assert second.preemptions < 0.6 * unaware.preemptions
    assert 0.9 < unaware.most <= 1.0 and second.most > 0.8


def test_a_conversation_keeps_its_prefix_when_new_weights_come(seen):
    first, second, other, third = seen["kept"]
    # The first turn computed 64 tokens, four blocks. The new conversation computes all with the new weights.
    assert (first, second, other, third) == (0, 64, 0, 80)


def test_recomputed_caches_are_of_the_new_weights(seen):
    first, second, _, third = seen["recomputed"]
    assert (first, second, third) == (0, 0, 80)
