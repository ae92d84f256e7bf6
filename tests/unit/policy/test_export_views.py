"""Parts of parameters as views, with a made-up conversion."""

from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.policy.megatron.export_views import ExportViews, strided

GROUPS, QUERIES, DIM, HIDDEN = 3, 2, 4, 5
ROWS = GROUPS * (QUERIES + 2) * DIM


def split(fused: torch.Tensor, _module=None) -> dict[str, torch.Tensor]:
    """Queries, keys and values of each group lie together; copies of them."""
    groups = fused.view(GROUPS, QUERIES + 2, DIM, *fused.shape[1:])
    parts = {"q": groups[:, :QUERIES], "k": groups[:, QUERIES], "v": groups[:, QUERIES + 1]}
    return {name: part.reshape(-1, *fused.shape[1:]).clone() for name, part in parts.items()}


def task(parameter: torch.Tensor, convert=split, names=("q", "k", "v")) -> SimpleNamespace:
    mapping = SimpleNamespace(hf_param={name: name for name in names}, megatron_to_hf=convert)
    return SimpleNamespace(mapping=mapping, param_weight=parameter, megatron_module=None)


@pytest.mark.parametrize("shape", [(ROWS, HIDDEN), (ROWS,)])
def test_views_of_a_fused_parameter_follow_its_values(shape):
    buffer = torch.arange(1000.0).bfloat16()
    # In the middle of a buffer, as megatron-core's parameters are.
    fused, norm = buffer[7 : 7 + torch.Size(shape).numel()].view(shape), buffer[900:905]
    views = ExportViews([fused, norm], [task(fused), None])
    for name, weight in {**split(fused), "norm": norm.detach()}.items():
        views.show(name, weight)
    found = dict(views.take())
    buffer.copy_(torch.randn(1000))
    for name, weight in split(fused).items():
        assert torch.equal(found[name].reshape(weight.shape), weight), name
    assert torch.equal(found["norm"], norm)


def test_one_group_is_one_block():
    index = torch.arange(12).view(4, 3) + 24
    assert strided(index, 36) == ([4, 3], [3, 1], 24)


@pytest.mark.parametrize(
    "index",
    [
        torch.arange(12).view(4, 3).flip(0),
        torch.arange(12).view(3, 4).t(),
        torch.tensor([[0, 1], [4, 5], [6, 7]]),
        torch.arange(12).view(4, 3) + 1,
        torch.arange(0),
        torch.tensor(3),
    ],
    ids=["backwards", "transposed", "irregular", "beyond", "empty", "a number"],
)
def test_what_is_less_regular_is_no_view(index):
    assert strided(index, 12) is None


@pytest.mark.parametrize(
    "convert",
    [lambda fused, _=None: {"q": fused * 2}, lambda fused, _=None: {"q": fused.t().contiguous()}],
    ids=["computed", "transposed"],
)
def test_other_weights_leave_the_export_to_the_bridge(convert):
    fused = torch.randn(4, 4)
    views = ExportViews([fused], [task(fused, convert, ["q"])])
    views.show("q", convert(fused)["q"])
    views.show("fused", fused)
    assert views.take() is None


def test_a_weight_of_no_task_leaves_the_export_to_the_bridge():
    norm = torch.zeros(2)
    views = ExportViews([norm], [])
    views.show("lm_head", torch.ones(2))
    assert views.take() is None


def test_experts_of_one_exported_tensor_leave_the_export_to_the_bridge():
    experts = [torch.randn(2, 3), torch.randn(2, 3)]
    tasks = [task(one, lambda fused, _=None: {"experts": fused.clone()}, ["experts"]) for one in experts]
    views = ExportViews(experts, tasks)
    views.show("experts", torch.stack(experts))
    assert views.take() is None


def test_a_weight_that_its_conversion_does_not_name_leaves_the_export_to_the_bridge():
    fused = torch.randn(4, 4)
    views = ExportViews([fused], [task(fused, lambda fused, _=None: {"other": fused.clone()}, ["q"])])
    views.show("q", fused.clone())
    assert views.take() is None
