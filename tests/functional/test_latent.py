"""Models like DeepSeek-V3: latent attention, dense first layers, a shared expert, biased routers, FP8 blocks."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl_lite.config.schema import LoraConfig
from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.planning.parameters import whole_trained_parameters
from tests.functional.here import train_here
from tests.functional.rank import path_of
from tests.functional.ranks import run_ranks
from tests.functional.supervised import LORA, SFT, series, write_data
from tests.functional.test_lora import adapters_give_the_merged_weights
from tests.functional.test_parallel_parity import BATCHES, PACKED, Outcome, read

pytestmark = pytest.mark.functional

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    # vLLM on CPUs needs heads of 32 or more.
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    # vLLM reads these; published models have them.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
TWO, PARALLEL = "cluster.cpu_ranks=2", "policy.megatron_cfg.{}_model_parallel_size=2"
LAYOUTS = {
    "one rank": (1, BATCHES),
    "packed": (1, BATCHES + PACKED),
    "pipeline 2": (2, [*BATCHES, TWO, PARALLEL.format("pipeline")]),
    "experts 2": (2, [*BATCHES, TWO, PARALLEL.format("expert")]),
}
BLOCK = 128


def latent_model(folder: Path, **own: Any) -> Path:
    """Write a small random model of DeepSeek-V3's architecture, and these fields of its configuration."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from nemo_rl_lite.models.embedded import build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | ends | own))
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def quantize(plain: Path, folder: Path) -> Path:
    """Write a model's projections in FP8 blocks, as DeepSeek does, and round those of the folder `plain` to the same
    values."""
    shutil.copytree(plain, folder)
    weights, stored = load_file(plain / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        scales, rounded = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                block = (
                    slice(row * BLOCK, (row + 1) * BLOCK),
                    slice(column * BLOCK, (column + 1) * BLOCK),
                )
                scales[row, column] = weight[block].abs().max() / 448
                rounded[block] = (weight[block] / scales[row, column]).to(rounded.dtype)
                # Dequantized to bfloat16.
                weights[name][block] = (rounded[block].float() * scales[row, column]).bfloat16().float()
        stored |= {name: rounded, f"{name}_scale_inv": scales}
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Models by name. "rounded" has the weights of "fp8" in float32."""
    folder = tmp_path_factory.mktemp("latent")
    found = {
        "whole": latent_model(folder / "whole"),
        "queries not compressed": latent_model(folder / "lite", q_lora_rank=None),
        "rounded": latent_model(folder / "rounded"),
    }
    return found | {"fp8": quantize(found["rounded"], folder / "fp8")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where ranks write their results and exports."""
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def outcomes(models, folder) -> dict[str, Outcome]:
    script = Path(__file__).with_name("policy_rank.py")
    for count in (1, 2):
        own = {name: overrides for name, (ranks, overrides) in LAYOUTS.items() if ranks == count}
        run_ranks(script, [str(models["whole"]), str(folder), json.dumps(own)], count)
    for name in ("queries not compressed", "fp8"):
        run_ranks(script, [str(models[name]), str(folder), json.dumps({name: BATCHES})], 1)
    return {name: read(path_of(folder, name)) for name in (*LAYOUTS, "queries not compressed", "fp8")}


def logprobs(folder: Path, outcome: Outcome) -> np.ndarray:
    """Logprobs [rows, length - 1] under transformers, 0 in the padding."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(outcome.tokens).logits
    scaled = (logits / outcome.temperature).log_softmax(-1)[:, :-1]
    inside = torch.arange(1, outcome.tokens.shape[1]) < outcome.lengths[:, None]
    return torch.where(inside, scaled.gather(-1, outcome.tokens[:, 1:, None]).squeeze(-1), 0.0).numpy()


@pytest.mark.parametrize(
    ("name", "model"),
    [("one rank", "whole"), ("queries not compressed", "queries not compressed"), ("fp8", "rounded")],
)
def test_logprobs_before_and_after_training_are_those_of_transformers(name, model, outcomes, models, folder):
    outcome, exported = outcomes[name], Path(f"{path_of(folder, name)}.hf")
    np.testing.assert_allclose(outcome.logprobs[:, 1:], logprobs(models[model], outcome), atol=1e-4)
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    np.testing.assert_allclose(outcome.own_after[:, 1:], logprobs(exported, outcome), atol=1e-4)
    assert np.abs(outcome.own_after - outcome.logprobs).max() > 1e-3


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layouts_agree_with_one_rank(layout, outcomes):
    one, other = outcomes["one rank"], outcomes[layout]
    np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-4)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        torch.testing.assert_close(other.weights[name], weight, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refits_copy_slices_of_parameters_and_biases(layout, outcomes):
    assert all(same for rank in outcomes[layout].assembled for same, _, _ in rank)


@pytest.mark.parametrize("name", ["whole", "fp8"])
def test_engines_compute_with_the_weights_of_each_refit(name, models, tmp_path):
    _, metrics = train_here(
        tmp_path / "run",
        models[name],
        *("algorithm.max_num_steps=2", "algorithm.num_prompts_per_step=4", "policy.train_global_batch_size=32"),
        *("algorithm.val_at_start=false", "algorithm.val_at_end=false", "checkpoint.export_hf_at_end=false"),
        *("policy.megatron_cfg.optimizer.lr=0.01", "policy.megatron_cfg.optimizer.weight_decay=10"),
        *("policy.megatron_cfg.scheduler.lr_warmup_iters=0", "generation=vllm"),
        elsewhere=["generation"],
    )
    differences = [line["refit/probe_logprob_diff"] for line in metrics if "refit/probe_logprob_diff" in line]
    assert len(differences) == 3 and max(differences) < 1e-4


@pytest.mark.parametrize(
    ("name", "queries"), [("whole", ["q_a_proj", "q_b_proj"]), ("queries not compressed", ["q_proj"])]
)
def test_by_default_each_projection_of_attention_gets_an_adapter(name, queries, models, tmp_path):
    run = tmp_path / "run"
    _, metrics = train_here(run, models[name], *SFT, *write_data(tmp_path), *LORA)
    assert series(metrics, "validation/val_loss")[-1] < series(metrics, "validation/val_loss")[0]
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    targets = set(config["target_modules"])
    attention = {*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert targets == attention | {"gate_proj", "up_proj", "down_proj"}
    before, after = (load_file(folder / "model.safetensors") for folder in (models[name], run / "hf"))
    changed = {name.split(".")[-2] for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == targets
    adapters_give_the_merged_weights(run, models[name])
    # The policy's gate and up projection share A.
    adapters = load_file(run / "adapter" / "adapter_model.safetensors")
    trained = sum(one.numel() for name, one in adapters.items() if "up_proj.lora_A" not in name)
    peft = LoraConfig(enabled=True, dim=config["r"], alpha=1, dropout=0, target_modules=[])
    assert trained == whole_trained_parameters(find_shape(str(models[name])), peft, grouped=False)
