"""An engine on a GPU whose runner repeats batches, and prepares each one. Argument: the model's folder."""

import sys
from unittest import mock

import numpy as np

from nemo_rl_lite.compat import vllm_batches
from nemo_rl_lite.generation.interface import Request, Sampling
from nemo_rl_lite.generation.vllm.worker import VLLMEngine
from nemo_rl_lite.validation.compose import compose_config
from tests.gpu.test_run import SMALL

COUNT = 40
(model_folder,) = sys.argv[1:]
own = ["policy.max_total_sequence_length=256", "generation.max_new_tokens=200"]
own += ["+generation.vllm_kwargs.load_format=auto", "cluster.gpus_per_node=1", f"policy.model_name={model_folder}"]
config = compose_config([*SMALL, *own])
engine = VLLMEngine(config.generation, config.policy, model_folder, seed=0, on_gpu=True)
assert engine._engine.vllm_config.use_v2_model_runner


def completions(late: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Responses of many lengths, of requests of which some come late."""
    requests = {
        number: Request(
            # Less than a cache block, so that the second time computes the prompts, too.
            (5 + number // 4,) * (3 + number % 12),
            Sampling(1.0, (1.0, 0.9)[number % 8 == 7], None, 1 + 5 * number, (), ()),
            seed=number,
        )
        for number in range(COUNT)
    }
    first = {number: request for number, request in requests.items() if not late or number % 5}
    engine.submit(first)
    found, turn = {}, 0
    while len(found) < COUNT:
        found |= engine.step()
        turn += 1
        if turn == 30 and late:
            engine.submit({number: one for number, one in requests.items() if number not in first})
    return [(found[number].tokens, found[number].logprobs) for number in range(COUNT)]


for late in (False, True):
    with mock.patch.object(vllm_batches, "advance", wraps=vllm_batches.advance) as advanced:
        repeated = completions(late)
    with mock.patch.object(vllm_batches, "repeats", return_value=False):
        prepared = completions(late)
    assert advanced.call_count > 60, advanced.call_count
    for number, (one, other) in enumerate(zip(repeated, prepared, strict=True)):
        assert len(one[0]) == 1 + 5 * number
        # The same kernels compute the same batches.
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_allclose(one[1], other[1], atol=1e-3)
