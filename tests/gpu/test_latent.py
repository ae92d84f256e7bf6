"""Whole runs of a model like DeepSeek-V3 on a GPU: vLLM's absorbed matrices follow each refit."""

from pathlib import Path

import pytest

from tests.gpu.conftest import saved_model
from tests.gpu.test_run import check, run

# vLLM's kernels of latent attention need the widths of published models.
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Four of eight experts, and no larger scale: otherwise bfloat16 moves logprobs of random weights too far.
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 256}
OWN = {"first_k_dense_replace": 1, "num_key_value_heads": 8, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
SCALE = {"routed_scaling_factor": 1.0}


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory) -> Path:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    own = LATENT | EXPERTS | OWN | SCALE | {"head_dim": 64}
    return saved_model(tmp_path_factory.mktemp("latent"), DeepseekV3ForCausalLM, DeepseekV3Config, **own)


@pytest.mark.gpu(1)
def test_policy_and_engine_agree_after_every_refit(latent_model, tmp_path):
    own = ["generation.colocated.sleep=true", "+generation.vllm_kwargs.moe_backend=triton"]
    check(run(tmp_path / "run", latent_model, 1, *own))
    assert "Using V2 Model Runner" in "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
