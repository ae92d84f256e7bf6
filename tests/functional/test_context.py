"""Ranks that share each sequence give the loss, the logprobs and the gradients of one rank."""

from pathlib import Path

import pytest
import torch

from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

# Tensor, context and data parallel.
LAYOUTS = {
    "context 2": (1, 2, 1),
    "context 4": (1, 4, 1),
    "context 2, data 2": (1, 2, 2),
    "context 2, tensor 2": (2, 2, 1),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")

    def run(tensor: int, context: int, data: int) -> dict:
        output = folder / f"{tensor}-{context}-{data}"
        if not output.exists():
            arguments = [str(output), str(tensor), str(context)]
            run_ranks(Path(__file__).with_name("context_rank.py"), arguments, tensor * context * data, timeout_s=300)
        return torch.load(output, weights_only=False)

    return run


def whole(result: dict, name: str) -> torch.Tensor:
    """Scores of all rows, padded, from the ranks that stand for a replica."""
    parts = [(place.data_rank, scored[name]) for place, scored, *_ in result["ranks"] if place.reports]
    longest = max(part.shape[1] for _, part in parts)
    pad = lambda part: torch.nn.functional.pad(part, (0, 0) * (part.dim() - 2) + (0, longest - part.shape[1]))  # noqa: E731
    return torch.cat([pad(part) for _, part in sorted(parts, key=lambda part: part[0])])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_sequences_are_those_of_one_rank(layout, found):
    tensor, context, data = LAYOUTS[layout]
    ours, alone = found(tensor, context, data), found(tensor, 1, 1)
    reporting = [rank for rank in ours["ranks"] if rank[0].reports]
    assert [place.data_rank for place, *_ in reporting] == list(range(data))
    names = alone["ranks"][0][1].keys()
    assert {"logprobs", "entropy"} <= names
    for name in names:
        expected = whole(alone, name)
        assert expected.float().std() > 0.05
        torch.testing.assert_close(whole(ours, name), expected, rtol=1e-5, atol=1e-6)
    # A training pass keeps the logprobs of a separate pass.
    torch.testing.assert_close(whole(ours, "kept"), whole(ours, "logprobs"), rtol=1e-5, atol=1e-6)
    # All ranks of a replica have computed the same loss, and one of them reports it.
    loss = sum(metrics["loss"] for _, _, metrics, *_ in reporting)
    assert loss == pytest.approx(alone["ranks"][0][2]["loss"], rel=1e-6)
    for place, _, _, gradients, _ in ours["ranks"]:
        expected = next(own for other, _, _, own, _ in alone["ranks"] if other.tensor_rank == place.tensor_rank)
        for name, gradient in expected.items():
            assert gradient.abs().max() > 1e-3, name
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=f"{name} of {place}")


def test_there_were_several_micro_batches(found):
    """Some of the loss's factors are their number."""
    assert found(1, 2, 1)["ranks"][0][4] > 1
