"""Values and gradients of the GRPO loss against TRL's GRPOTrainer, on the same random inputs."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_lite.config.schema_algorithm import LossConfig
from nemo_rl_lite.losses.grpo import GRPOLoss
from nemo_rl_lite.losses.interface import count_masked
from tests.unit.losses.batches import loss_config, rows_of, split_loss

TOLERANCE = 1e-5


def random_inputs(seed: int = 0, rows: int = 6, prompt: int = 3, response: int = 7) -> dict[str, torch.Tensor]:
    """Sequences of `prompt` + `response` tokens whose responses end at random places."""
    source = torch.Generator().manual_seed(seed)
    shape = (rows, prompt + response)
    logprobs = -torch.rand(shape, generator=source) * 3
    lengths = torch.randint(1, response + 1, (rows, 1), generator=source)
    place = torch.arange(prompt + response)[None] - prompt

    def near(scale: float) -> torch.Tensor:
        return logprobs + scale * torch.randn(shape, generator=source)

    return {
        "logprobs": logprobs,
        "previous_logprobs": near(0.4),
        "generation_logprobs": near(0.4),
        "reference_logprobs": near(0.4),
        "mask": ((place >= 0) & (place < lengths)).float(),
        "advantages": torch.randn(rows, generator=source),
    }


def our_loss(config: LossConfig, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return split_loss(GRPOLoss(config), inputs, count_masked(rows_of(inputs["mask"])))[:2]


def trl_loss(config: LossConfig, inputs: dict[str, torch.Tensor], prompt: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's own `_compute_loss`, with a trainer reduced to the attributes it reads."""
    # Its import takes seconds, in every process that collects tests.
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs = inputs["logprobs"].clone().requires_grad_()
    response = {name: values[:, prompt:] for name, values in inputs.items() if values.dim() == 2}
    correction = (response["previous_logprobs"] - response["generation_logprobs"]).exp()
    if config.truncated_importance_sampling_ratio is not None:
        correction = correction.clamp(max=config.truncated_importance_sampling_ratio)
    unchanged = lambda value, **_: value  # noqa: E731
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if config.sequence_level_importance_ratios else "token",
        beta=config.reference_policy_kl_penalty,
        args=SimpleNamespace(use_bias_correction_kl=config.use_bias_correction_kl, delta=config.ratio_clip_c),
        loss_type="bnpo" if config.token_level_loss else "grpo",
        epsilon_low=config.ratio_clip_min,
        epsilon_high=config.ratio_clip_max,
        use_vllm=config.use_importance_sampling_correction,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(gather=unchanged, reduce=unchanged),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs[:, prompt:], torch.zeros(1, 1), None),
    )
    rows = logprobs.shape[0]
    loss = GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": torch.zeros(rows, prompt, dtype=torch.long),
            "prompt_mask": torch.ones(rows, prompt),
            "completion_ids": torch.zeros(rows, logprobs.shape[1] - prompt, dtype=torch.long),
            "completion_mask": response["mask"],
            "advantages": inputs["advantages"],
            "old_per_token_logps": response["previous_logprobs"],
            "ref_per_token_logps": response["reference_logprobs"],
            "importance_sampling_ratio": correction,
        },
    )
    loss.backward()
    return loss.detach(), logprobs.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ratio_clip_max": 0.28},
        {"token_level_loss": False},
        {"ratio_clip_c": 1.5},
        {"reference_policy_kl_penalty": 0.1},
        {"reference_policy_kl_penalty": 0.1, "use_bias_correction_kl": False},
        {"reference_policy_kl_penalty": 0.1, "token_level_loss": False},
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
        {"use_importance_sampling_correction": True},
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.2},
        {
            "ratio_clip_max": 0.28,
            "ratio_clip_c": 2.0,
            "reference_policy_kl_penalty": 0.05,
            "use_bias_correction_kl": False,
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_ratio": 2.0,
        },
    ],
    ids=lambda changes: "+".join(changes) or "defaults",
)
def test_value_and_gradient_agree_with_trl(changes, seed):
    config, inputs = loss_config(**changes), random_inputs(seed)
    if config.use_bias_correction_kl and config.reference_policy_kl_penalty:
        # TRL weights the KL by the policy over the previous one, whichever engine sampled.
        inputs["generation_logprobs"] = inputs["previous_logprobs"]
    ours, our_gradient = our_loss(config, inputs)
    theirs, their_gradient = trl_loss(config, inputs)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(our_gradient, their_gradient, atol=TOLERANCE, rtol=TOLERANCE)
