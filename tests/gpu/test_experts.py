"""Experts that one CUTLASS kernel multiplies, with all tokens, some or none."""

import pytest
import torch

from nemo_rl_lite.compat import transformer_engine

SIZES = {"in_features": 256, "out_features": 512, "bias": False}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [[64, 64, 64, 64], [0, 128, 0, 128], [0, 0, 0, 0]], ids=["all", "some", "none"])
def test_results_and_gradients_are_those_of_matrix_products(tokens):
    from transformer_engine.pytorch import GroupedLinear  # pyrefly: ignore[missing-import]

    transformer_engine.multiply_experts_at_once()
    torch.manual_seed(0)
    experts = GroupedLinear(num_gemms=len(tokens), params_dtype=torch.bfloat16, device="cuda", **SIZES)
    rows = torch.randn(sum(tokens), SIZES["in_features"], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    found = experts(rows, tokens)
    found.float().square().sum().backward()

    copied = rows.detach().requires_grad_()
    weights = [getattr(experts, f"weight{place}").detach().requires_grad_() for place in range(len(tokens))]
    parts = copied.split(tokens)
    wanted = torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])
    wanted.float().square().sum().backward()
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(rows.grad, copied.grad, rtol=3e-2, atol=3e-1)
    for place, weight in enumerate(weights):
        gradient = getattr(experts, f"weight{place}").grad
        torch.testing.assert_close(
            gradient, torch.zeros_like(weight) if weight.grad is None else weight.grad, rtol=3e-2, atol=1
        )
