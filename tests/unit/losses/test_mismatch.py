"""Metrics of how far the engines' probabilities are from the policy's."""

import math

import pytest
import torch

from nemo_rl_lite.losses.batch import Batch, TokenRow
from nemo_rl_lite.losses.grpo import mismatch_metrics
from nemo_rl_lite.losses.interface import Normalizers, combine_metrics, count_masked
from tests.unit.losses.batches import batch_of
from tests.unit.losses.test_losses_match_trl import random_inputs


def mismatch(previous, generation, mask, tokens):
    batch = batch_of({"previous_logprobs": previous, "generation_logprobs": generation, "mask": mask})
    return floats(mismatch_metrics(batch, Normalizers(tokens, sequences=1)))


def floats(metrics):
    return {name: value.item() for name, value in metrics.items()}


def test_mismatch_metrics():
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    same = torch.tensor([[-9.0, -1.0, -2.0]])
    equal = mismatch(same, same, mask, 2)
    assert equal["token_mult_prob_error"] == 1
    assert equal["gen_kl_error"] == equal["policy_kl_error"] == equal["logprob_abs_diff_max"] == 0
    assert equal["js_divergence_error"] == pytest.approx(0, abs=1e-12)
    other = mismatch(same, same + torch.tensor([[5.0, 0.1, -0.2]]), mask, 2)
    assert other["token_mult_prob_error"] == pytest.approx((math.exp(0.1) + math.exp(0.2)) / 2, rel=1e-5)
    assert other["gen_kl_error"] == pytest.approx(
        ((math.exp(-0.1) - 1 + 0.1) + (math.exp(0.2) - 1 - 0.2)) / 2, rel=1e-4
    )
    assert other["logprob_abs_diff_max"] == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["previous", "generation"])
def test_tokens_without_a_loss_may_hold_anything(name, wrong):
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    own = {"previous": torch.tensor([[0.0, -1.0, -2.0, 0.0]]), "generation": torch.tensor([[0.0, -1.1, -1.8, 0.0]])}
    expected = mismatch(**own, mask=mask, tokens=2)
    own[name] = torch.where(mask > 0, own[name], wrong)
    assert mismatch(**own, mask=mask, tokens=2) == expected and all(map(math.isfinite, expected.values()))


def test_replicas_shares_of_the_mismatch_are_that_of_the_whole_rollout():
    inputs = random_inputs()
    tensors = [inputs[name] for name in ("previous_logprobs", "generation_logprobs", "mask")]
    tokens = inputs["mask"].sum().item()
    parts = [mismatch(*(values[rows] for values in tensors), tokens) for rows in (slice(0, 1), slice(1, 6))]
    assert combine_metrics(parts) == pytest.approx(mismatch(*tensors, tokens), rel=1e-12)


# The second sequence began under older weights than it ended under; the third is of one age alone, and has one token
# more that has no loss.
ROWS = [
    TokenRow([1, 1, 1], [False, True, True], [0.0, -1.0, -2.0], 0.0, [0, 1, 1]),
    TokenRow([1, 1, 1], [True, True, True], [-1.0, -1.0, -1.0], 0.0, [3, 1, 1]),
    TokenRow([1, 1], [False, True], [-1.0, -1.5], 0.0, [7, 0]),
]
PREVIOUS = torch.tensor([[0.0, -1.1, -1.8], [-1.3, -1.0, -0.9], [-5.0, -1.25, 0.0]])


def shares_of(*split):
    counts, start, shares = count_masked(ROWS), 0, []
    for size in split:
        own = slice(start, start + size)
        batch = Batch.padded(ROWS[own])
        batch = Batch(**{**vars(batch), "previous_logprobs": PREVIOUS[own, : batch.tokens.shape[1]]})
        shares.append(floats(mismatch_metrics(batch, counts)))
        start += size
    return shares


@pytest.mark.parametrize("split", [(3,), (1, 2), (1, 1, 1)])
def test_each_age_has_its_own_mean_however_the_rows_are_split(split):
    """Also where a replica has no token of an age."""
    shares = shares_of(*split)
    assert all(share.keys() == shares[0].keys() for share in shares)
    found = combine_metrics(shares)
    k3 = {
        place: math.exp(ratio) - 1 - ratio
        for place, ratio in {"a": -0.1, "b": 0.2, "c": -0.3, "d": 0.0, "e": 0.1, "f": 0.25}.items()
    }
    by_age = {0: [k3["f"]], 1: [k3["a"], k3["b"], k3["d"], k3["e"]], 3: [k3["c"]]}
    named = {name for name in found if name.startswith("age_")}
    assert named == {f"age_{age}/{name}" for age in by_age for name in ("gen_kl_error", "tokens_share")}
    for age, own in by_age.items():
        assert found[f"age_{age}/gen_kl_error"] == pytest.approx(sum(own) / len(own), rel=1e-5)
        assert found[f"age_{age}/tokens_share"] == pytest.approx(len(own) / 6)
    # The whole is the mean of the ages.
    shared = sum(found[f"age_{age}/gen_kl_error"] * found[f"age_{age}/tokens_share"] for age in by_age)
    assert found["gen_kl_error"] == pytest.approx(shared, rel=1e-5)


def test_rows_without_ages_have_no_such_metrics():
    rows = [TokenRow([1, 1], [False, True], [0.0, -1.0], 0.0)]
    assert count_masked(rows).tokens_by_age == {} and Batch.padded(rows).ages is None
