"""Ranks that share each sequence give the loss, the logprobs and the gradients of one rank."""

from pathlib import Path

import pytest
import torch

from tests.functional.context_rank import CASES, SHARED
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


def whole(ranks: list[tuple], name: str) -> torch.Tensor:
    """Scores of all rows, padded, from the ranks that stand for a replica."""
    parts = [(place.data_rank, scored[name]) for place, scored, *_ in ranks if place.reports]
    longest = max(part.shape[1] for _, part in parts)
    pad = lambda part: torch.nn.functional.pad(part, (0, 0) * (part.dim() - 2) + (0, longest - part.shape[1]))  # noqa: E731
    return torch.cat([pad(part) for _, part in sorted(parts, key=lambda part: part[0])])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_shared_sequences_are_those_of_one_rank(layout, case, found):
    tensor, context, data = LAYOUTS[layout]
    if len(CASES[case]) < data:
        pytest.skip("each replica needs a row")
    ours, alone = found(tensor, context, data)[case], found(tensor, 1, 1)[case]
    reporting = [rank for rank in ours if rank[0].reports]
    assert [place.data_rank for place, *_ in reporting] == list(range(data))
    names = alone[0][1].keys()
    assert {"logprobs", "entropy"} <= names
    for name in names:
        expected = whole(alone, name)
        assert expected.float().std() > 0.05
        torch.testing.assert_close(whole(ours, name), expected, rtol=1e-5, atol=1e-6)
    # A training pass keeps the logprobs of a separate pass.
    torch.testing.assert_close(whole(ours, "kept"), whole(ours, "logprobs"), rtol=1e-5, atol=1e-6)
    # All ranks of a replica know its scores and its loss, and one of them reports them.
    loss = sum(metrics["loss"] for _, _, metrics, *_ in reporting)
    assert loss == pytest.approx(alone[0][2]["loss"], rel=1e-6)
    for place, scored, metrics, gradients, _ in ours:
        reported = next(rank for rank in reporting if rank[0].data_rank == place.data_rank)
        assert metrics == pytest.approx(reported[2], rel=1e-6)
        assert all(torch.equal(scored[name], reported[1][name]) for name in ("logprobs", "kept"))
        expected = next(own for other, _, _, own, _ in alone if other.tensor_rank == place.tensor_rank)
        for name, gradient in expected.items():
            assert gradient.abs().max() > 1e-3, name
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=f"{name} of {place}")


def packs(context: int, case: str, found) -> list[list[tuple[bool, bool, list[int]]]]:
    """Of each rank's micro-batches: whether all ranks share it, whether it is a filler, and its rows."""
    return [own for *_, own in found(1, context, 1)[case]]


def test_there_were_several_micro_batches(found):
    """Some of the loss's factors are their number."""
    assert len(packs(2, SHARED, found)[0]) > 1


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_share_the_same_micro_batches_and_each_row_counts_once(case, context, found):
    of_ranks = packs(context, case, found)
    for same in zip(*of_ranks, strict=True):
        assert len({is_shared for is_shared, _, _ in same}) == 1
        if same[0][0]:
            assert all(one == same[0] for one in same)
    counted = [
        rows
        for rank, own in enumerate(of_ranks)
        for shared, filler, rows in own
        if not filler and not (shared and rank)
    ]
    assert sorted(row for rows in counted for row in rows) == list(range(len(CASES[case])))


@pytest.mark.parametrize(
    ("context", "case", "kinds"),
    [
        (2, SHARED, {True}),
        (2, "both kinds", {True, False}),
        # The others would wait for 11 tokens on one rank.
        (4, "both kinds", {True}),
        (2, "all short", {False}),
        (4, "all long", {True}),
        (2, "one", {True}),
    ],
)
def test_long_sequences_are_shared_and_short_ones_whole(context, case, kinds, found):
    assert {is_shared for own in packs(context, case, found) for is_shared, _, _ in own} == kinds
