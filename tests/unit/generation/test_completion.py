"""Completions: arrays, versions as runs, and what is equal."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from nemo_rl_lite.errors import EngineError
from nemo_rl_lite.generation.interface import Completion, Conversation, Request, Sampling, Unfinished
from nemo_rl_lite.generation.vllm.worker import UnfinishedResponse
from nemo_rl_lite.workers.generation import _require_finite

SAMPLING = Sampling(1.0, 1.0, None, 8, (), ())


def completion(versions=(2, 2, 3)) -> Completion:
    return Completion((5, 6, 7), (-0.5, -1 / 3, -1.0), "stop", versions)


def test_sequences_become_arrays_and_versions_runs():
    found = completion()
    assert (found.tokens.dtype, found.logprobs.dtype) == (np.int32, np.float32)
    assert found.versions == ((2, 2), (3, 1)) and completion(((2, 2), (3, 1))).versions == found.versions


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (5, 6, 8)},
        {"logprobs": (-0.5, -0.25, -1.0)},
        {"versions": (2, 3, 3)},
        {"finish_reason": "length"},
        {"tokens": (5, 6)},
    ],
)
def test_completions_with_the_same_content_are_equal(change):
    found = completion()
    assert found == completion() == pickle.loads(pickle.dumps(found)) and replace(found, **change) != found
    assert replace(found, routed_experts=np.zeros((2, 1, 1), np.uint8)) == found


def test_the_cache_of_a_conversation_has_the_version_of_its_first_token():
    talk, request = Conversation(), Request((1, 2), SAMPLING, 0)
    talk.add_turn(request, completion(), engine=1)
    assert (talk.cache_version, talk.tokens, talk.engine) == (2, 5, 1)


def test_a_response_over_a_refit_has_a_run_for_each_version():
    response = UnfinishedResponse(Request((1,), SAMPLING, 0), None)
    # Nothing was sampled before the first refit.
    response.note_version(1)
    for version, tokens in ((2, [5, 6]), (3, [7])):
        response.add(tokens, [-0.5] * len(tokens), ended=False)
        assert response.new_tokens(version) == Unfinished(
            tokens, [-0.5] * len(tokens), "length", [version] * len(tokens)
        )
        response.note_version(version)
    found = response.completion("stop", 4)
    assert found == Completion((5, 6, 7), (-0.5,) * 3, "stop", (2, 2, 3))


def test_a_logprob_that_is_not_finite_is_an_error_with_its_token():
    _require_finite(0, completion())
    message = r"rank 1 sampled token 6 \(position 2 of its response\) with logprob -inf"
    with pytest.raises(EngineError, match=message):
        _require_finite(1, replace(completion(), logprobs=(-0.5, -np.inf, np.nan)))
