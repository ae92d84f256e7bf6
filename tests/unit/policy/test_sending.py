import torch

from nemo_rl_lite.policy.micro_batches import packed, packed_bytes, unpacked

VALUES = {
    "tokens": torch.arange(35).reshape(5, 7),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "columns": torch.randn(6, 3)[:, 1],
    "one": torch.tensor(2.5, dtype=torch.float64),
    "experts": torch.arange(12, dtype=torch.int16).reshape(2, 3, 2).transpose(0, 1),
}


def same(found: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(VALUES) and all(
        found[name].dtype == values.dtype and torch.equal(found[name], values) for name, values in VALUES.items()
    )


def test_what_arrives_in_one_copy_is_what_was_packed():
    whole = packed(VALUES, pin=False)
    assert whole.shape == (packed_bytes(VALUES),)
    # The shapes and types of other tensors serve as well: those that a recorded pass was made with.
    shapes = {name: torch.empty_like(values) for name, values in VALUES.items()}
    there = torch.empty_like(whole)
    views = unpacked(there, shapes)
    there.copy_(whole)
    assert same(views)
