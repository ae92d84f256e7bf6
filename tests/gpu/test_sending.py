"""Tensors that travel to a GPU in one copy."""

import pytest
import torch

from nemo_rl_lite.policy.micro_batches import sent, sent_together


@pytest.mark.gpu
def test_what_arrives_together_is_what_arrives_one_by_one_also_where_host_memory_is_used_again():
    device, found, expected = torch.device("cuda"), [], []
    busy = torch.ones(8192, 8192, device=device)
    for number in range(50):
        # The copies wait behind this work, while the next ones are packed.
        busy = busy @ busy * 1e-4
        values = {
            "tokens": torch.arange(1000) + number,
            "mask": torch.arange(1000) % 3 == number % 3,
            "empty": torch.empty(0, 4),
            "logprobs": torch.arange(3000, dtype=torch.float32).reshape(1000, 3)[:, 1] * number,
        }
        found.append(sent_together(values, device))
        expected.append({name: sent(one.clone(), device) for name, one in values.items()})
    for one, other in zip(found, expected, strict=True):
        for name, values in one.items():
            assert values.device.type == "cuda" and torch.equal(values, other[name]), name
