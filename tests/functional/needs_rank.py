"""One rank of a split vocabulary: what losses need, computed from logits and compared with torch on all of them.

needs_rank.py: prints nothing and ends well, or with an AssertionError.
"""

import os

import torch
import torch.distributed as dist

from nemo_rl_lite.compat.megatron_cpu import prepare_import

prepare_import()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from nemo_rl_lite.losses.batch import Batch, TokenRow  # noqa: E402
from nemo_rl_lite.losses.interface import count_masked, masked_sum  # noqa: E402
from nemo_rl_lite.losses.supervised import SFTLoss  # noqa: E402
from nemo_rl_lite.policy import logprobs  # noqa: E402
from nemo_rl_lite.policy.context import Shard  # noqa: E402
from nemo_rl_lite.policy.logprobs import scores_of  # noqa: E402
from nemo_rl_lite.policy.micro_batches import Layout, cut  # noqa: E402

VOCABULARY, TEMPERATURE, TOPK = 64, 0.7, 5
# Several slices of each rank's vocabulary, the last one narrower.
logprobs.VOCABULARY_SLICE = 7
LAYOUTS = (Layout("fixed", 3, 1), Layout("dynamic", 48, 4), Layout("packed", 40, 8))


class EntropyBonus(SFTLoss):
    needs = frozenset({"entropy"})

    def __call__(self, logprobs_BT, batch, counts):
        total, metrics = super().__call__(logprobs_BT, batch, counts)
        (entropy_BT,) = batch.require("entropy")
        return total - 0.3 * masked_sum(entropy_BT, batch.mask) / counts.tokens, metrics


class Topk(SFTLoss):
    needs, topk = frozenset({"topk_logits"}), TOPK


class OfTeacher(SFTLoss):
    needs = frozenset({"student_topk_logprobs", "entropy"})


def main() -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    source = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (7,), generator=source).tolist()
    rows = [
        TokenRow(torch.randint(0, VOCABULARY, (own,), generator=source).tolist(), [place > 0 for place in range(own)])
        for own in lengths
    ]
    batch = Batch.padded(rows)
    # The model's logits at a place depend on sequence and place alone, so that every layout has the same.
    logits_BTV = 3 * torch.randn(*batch.tokens.shape, VOCABULARY, generator=source)
    for layout in LAYOUTS:
        compare(batch, logits_BTV, rows, layout)
        plain_agrees(batch, logits_BTV, rows, layout)
        soft_cap_agrees(batch, logits_BTV, layout)
        compare_topk(batch, logits_BTV, layout)
        for keep in (False, True):
            compare_others(batch, logits_BTV, layout, keep)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def compare(batch: Batch, logits_BTV: torch.Tensor, rows: list[TokenRow], layout: Layout) -> None:
    """Value and gradient of the loss against torch; without a gradient in chunks, the same values."""
    loss, counts = EntropyBonus(), count_masked(rows)
    expected_BTV = logits_BTV.clone().requires_grad_()
    expected = of_torch(batch, expected_BTV, counts.tokens)
    expected.backward()
    total = torch.zeros(())
    for micro in cut(batch.tokens, batch.lengths, layout):
        layer, hidden = own_part(), place(micro, logits_BTV).requires_grad_()
        own = batch.rows(micro.rows, micro.width)
        needed = scores(micro, hidden, layer, loss)
        with torch.no_grad():
            again = scores(micro, hidden, layer, loss)
        assert needed.keys() == again.keys() == {"logprobs", "entropy"}
        for name, values in needed.items():
            assert torch.equal(again[name], values.detach())
        value, _ = loss(needed.pop("logprobs"), Batch(**(vars(own) | needed)), counts)
        value.backward()
        total = total + value.detach()
        # The last matrix is the identity, so that hidden states are logits; its gradient is checked through them.
        expected_nSV = place(micro, expected_BTV.grad)
        torch.testing.assert_close(hidden.grad, expected_nSV, atol=1e-5, rtol=1e-5, msg=f"gradient, {layout}")
        of_weight = own_slice(expected_nSV).flatten(0, 1).T @ hidden.detach().flatten(0, 1)
        torch.testing.assert_close(layer.weight.grad, of_weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total, expected.detach(), atol=1e-5, rtol=1e-5)


def scores(micro, hidden_nSV: torch.Tensor, layer, loss, ids_bTk=None, keep=False) -> dict[str, torch.Tensor]:
    found = scores_of(Shard.whole(micro), TEMPERATURE, loss, lambda weight: None, ids_bTk, keep)
    return found(hidden_nSV.transpose(0, 1), layer, None)


def own_part():
    """An output layer that has this rank's rows of the identity."""
    settings = TransformerConfig(
        num_layers=1, hidden_size=VOCABULARY, num_attention_heads=1, use_cpu_initialization=True
    )
    settings.tensor_model_parallel_size = dist.get_world_size()
    layer = ColumnParallelLinear(
        VOCABULARY,
        VOCABULARY,
        config=settings,
        init_method=torch.nn.init.zeros_,
        bias=False,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    with torch.no_grad():
        layer.weight.copy_(own_slice(torch.eye(VOCABULARY)).T)
    return layer


def plain_agrees(batch: Batch, logits_BTV: torch.Tensor, rows: list[TokenRow], layout: Layout) -> None:
    """Logprobs alone take a shorter way; the gradient is the same, also of certain tokens and of none."""
    chosen_BT = torch.nn.functional.one_hot(batch.tokens.roll(-1, dims=1), VOCABULARY)
    certain_BTV = logits_BTV + 30 * chosen_BT * (torch.arange(batch.tokens.shape[1]) % 3 == 0)[:, None]
    for micro in cut(batch.tokens, batch.lengths, layout):
        found = []
        for loss in (None, EntropyBonus()):
            layer, hidden = own_part(), place(micro, certain_BTV).requires_grad_()
            logprobs_BT = scores(micro, hidden, layer, loss)["logprobs"]
            (logprobs_BT * batch.rows(micro.rows, micro.width).mask).sum().backward()
            found.append((logprobs_BT.detach(), hidden.grad, layer.weight.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


class Capped(ColumnParallelLinear):
    """An output layer as Gemma 2 has it."""

    def forward(self, *inputs, **options):
        raise AssertionError("the logits are not computed by the layer")


def soft_cap_agrees(batch: Batch, logits_BTV: torch.Tensor, layout: Layout) -> None:
    """Logprobs of capped logits and their gradient against torch."""
    capped_BTV = logits_BTV.clone().requires_grad_()
    logprobs_BTV = (5 * (capped_BTV / 5).tanh() / TEMPERATURE).log_softmax(-1)
    chosen_BT = logprobs_BTV[:, :-1].gather(2, batch.tokens[:, 1:, None])[..., 0] * batch.mask[:, 1:]
    chosen_BT.sum().backward()
    for micro in cut(batch.tokens, batch.lengths, layout):
        layer, hidden = own_part(), place(micro, logits_BTV).requires_grad_()
        layer.__class__, layer.config.final_logit_softcapping = Capped, 5.0
        mask_BT = batch.rows(micro.rows, micro.width).mask
        found_BT = scores(micro, hidden, layer, None)["logprobs"] * mask_BT
        found_BT.sum().backward()
        expected_BT = chosen_BT[micro.rows, : micro.width - 1].detach()
        torch.testing.assert_close(found_BT[:, 1:].detach(), expected_BT, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(hidden.grad, place(micro, capped_BTV.grad), atol=1e-5, rtol=1e-5)


def of_torch(batch: Batch, logits_BTV: torch.Tensor, tokens: float) -> torch.Tensor:
    logprobs_BTV = (logits_BTV / TEMPERATURE).log_softmax(-1)
    entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)[:, :-1]
    chosen_BT = logprobs_BTV[:, :-1].gather(2, batch.tokens[:, 1:, None])[..., 0]
    return -((chosen_BT + 0.3 * entropy_BT) * batch.mask[:, 1:]).sum() / tokens


def compare_topk(batch: Batch, logits_BTV: torch.Tensor, layout: Layout) -> None:
    values, ids = (logits_BTV / TEMPERATURE).topk(TOPK, dim=-1)
    for micro in cut(batch.tokens, batch.lengths, layout):
        hidden, expected_nSV = place(micro, logits_BTV).requires_grad_(), place(micro, logits_BTV).requires_grad_()
        found = scores(micro, hidden, own_part(), Topk())
        (found["topk_logits"] * torch.arange(TOPK)).sum().backward()
        top_Nk = (expected_nSV.flatten(0, 1) / TEMPERATURE).topk(TOPK, dim=-1).values
        (micro.unpack(top_Nk) * torch.arange(TOPK)).sum().backward()
        torch.testing.assert_close(hidden.grad, expected_nSV.grad)
        for row, length, own, own_ids in zip(
            micro.rows, micro.lengths, found["topk_logits"], found["topk_ids"], strict=True
        ):
            torch.testing.assert_close(own[1:length], values[row, : length - 1])
            assert torch.equal(own_ids[1:length], ids[row, : length - 1]) and own_ids.dtype == torch.int64
            assert (own[0] == 0).all() and (own[length:] == 0).all()


def compare_others(batch: Batch, logits_BTV: torch.Tensor, layout: Layout, keep: bool) -> None:
    """Logprobs of tokens that somebody else names, one of them twice, with the gradient of them and of the entropy."""
    source = torch.Generator().manual_seed(1)
    ids_BTk = torch.randint(0, VOCABULARY, (*batch.tokens.shape, TOPK), generator=source)
    ids_BTk[..., 1] = ids_BTk[..., 0]
    factors_k = torch.arange(1.0, TOPK + 1)
    whole_BTV = logits_BTV.clone().requires_grad_()
    logprobs_BTV = (whole_BTV / TEMPERATURE).log_softmax(-1)[:, :-1]
    expected_BTk = logprobs_BTV.gather(2, ids_BTk[:, 1:])
    entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)
    (((expected_BTk * factors_k).sum(-1) + entropy_BT) * batch.mask[:, 1:]).sum().backward()
    for micro in cut(batch.tokens, batch.lengths, layout):
        hidden, own = place(micro, logits_BTV).requires_grad_(), batch.rows(micro.rows, micro.width)
        ids = ids_BTk[micro.rows, : micro.width]
        found = scores(micro, hidden, own_part(), OfTeacher(), ids, keep)
        assert found.keys() == {"logprobs", "entropy", "student_topk_logprobs"}
        others_bTk = found["student_topk_logprobs"]
        (((others_bTk * factors_k).sum(-1) + found["entropy"]) * own.mask).sum().backward()
        inside = own.mask[:, 1:, None] > 0
        of_torch_bTk = expected_BTk[micro.rows, : micro.width - 1].detach()
        torch.testing.assert_close(
            torch.where(inside, others_bTk[:, 1:].detach(), 0.0), torch.where(inside, of_torch_bTk, 0.0)
        )
        torch.testing.assert_close(hidden.grad, place(micro, whole_BTV.grad), atol=1e-5, rtol=1e-5)


def place(micro, values_BTV: torch.Tensor) -> torch.Tensor:
    """Values of sequences where the micro-batch has them in the model's input, [n, S, V]; 0 in the padding."""
    placed = torch.zeros(micro.tokens_nS.numel(), VOCABULARY)
    for row, start, length in zip(micro.rows, micro.starts, micro.lengths, strict=True):
        placed[start : start + length] = values_BTV[row, :length]
    return placed.view(*micro.tokens_nS.shape, VOCABULARY)


def own_slice(values_nSV: torch.Tensor) -> torch.Tensor:
    return values_nSV.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].clone()


if __name__ == "__main__":
    main()
