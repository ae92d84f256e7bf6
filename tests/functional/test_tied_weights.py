"""Models whose embedding and last layer share a matrix, also with experts: engines compute with what a refit brings."""

import pytest
import torch

from tests.functional.here import train_here
from tests.functional.test_vllm_loader import EXPERTS, SIZES

pytestmark = pytest.mark.functional


# vLLM's last layer is the embedding itself in its Qwen3, and a module with the same matrix in its Llama.
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_the_probe_agrees_after_every_refit(tmp_path, kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rl_lite.models.embedded import build_tokenizer

    torch.manual_seed(0)
    folder, run = tmp_path / "model", tmp_path / "run"
    experts = EXPERTS if kind == "qwen3_moe" else {}
    tied = AutoConfig.for_model(kind, **SIZES, **experts, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(tied).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    _, metrics = train_here(
        run,
        folder,
        *("algorithm.max_num_steps=3", "algorithm.num_prompts_per_step=4", "policy.train_global_batch_size=32"),
        *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "checkpoint.export_hf_at_end=false"),
        # The reward of random responses teaches little; the decay alone moves every weight.
        *("policy.megatron_cfg.optimizer.lr=0.01", "policy.megatron_cfg.optimizer.weight_decay=10"),
        *("policy.megatron_cfg.scheduler.lr_warmup_iters=0", "generation=vllm"),
        elsewhere=["generation"],
    )
    differences = [line["refit/probe_logprob_diff"] for line in metrics if "refit/probe_logprob_diff" in line]
    assert len(differences) == 4 and max(differences) < 1e-4
