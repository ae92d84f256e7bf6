"""Drafts with a model: exact logprobs while drafts come and go, and weights that refits do not change."""

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.draft_models import eagle3_head
from tests.functional.test_engines import Producer, check_logprobs, load, refitted

pytestmark = pytest.mark.functional

METHODS = ("eagle3", "draft_model", "mtp")
# The layer for multi-token prediction of `model_with_own_draft`.
DRAFT = "model.layers.4."


@pytest.fixture(scope="module", params=METHODS)
def seen(request, model_folder, engine_environment, tmp_path_factory):
    """The method, the policies before and after a refit, and what an engine process saw (drafts_process.py)."""
    folder, method, policy = tmp_path_factory.mktemp("drafts"), request.param, model_folder
    if method == "mtp":
        policy, options = model_with_own_draft(folder / "model"), []
    elif method == "eagle3":
        # With fewer positions than the engine's sequences, as published heads have.
        sizes = json.loads((model_folder / "config.json").read_text()) | {"max_position_embeddings": 16}
        head = eagle3_head(folder / "head", sizes, layers=(1, 2, 3))
        options = [f"generation.draft_model={head}"]
    else:
        # All of its greedy drafts are right, until the policy has other weights.
        options = [f"generation.draft_model={model_folder}"]
    change(policy, folder / "new")
    old, new = load(policy).eval(), load(folder / "new").eval()
    refits = [
        Producer(".old", own_weights(policy), shared=True),
        Producer(".new", own_weights(folder / "new"), shared=True),
    ]
    for producer in refits:
        (folder / f"source{producer.name}").write_bytes(pickle.dumps(producer.sources[0]))
    arguments = [policy, folder / "source", folder / "seen", f"generation.speculation={method}", *options]
    script = Path(__file__).with_name("drafts_process.py")
    refitted(script, arguments, engine_environment, folder / "log", refits)
    return pickle.loads((folder / "seen").read_bytes()) | {"method": method, "models": (old, new)}


def change(policy: Path, target: Path) -> None:
    """Write the model with other weights, apart from its draft's."""
    shutil.copytree(policy, target)
    weights, generator = load_file(policy / "model.safetensors"), torch.Generator().manual_seed(5)
    for name, weight in weights.items():
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator) * (not name.startswith(DRAFT)))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def own_weights(policy: Path) -> list[tuple[str, torch.Tensor]]:
    """Return the weights that a refit brings."""
    weights = load_file(policy / "model.safetensors")
    return [(name, weight) for name, weight in weights.items() if not name.startswith(DRAFT)]


def model_with_own_draft(folder: Path) -> Path:
    """Write a small random GLM-4.5 with a layer of experts and one for multi-token prediction."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    from nemo_rl_lite.models.embedded import build_tokenizer

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
        num_nextn_predict_layers=1,
    )
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    layer = {name: one.clone() for name, one in weights.items() if name.startswith("model.layers.3.")}
    weights |= {name.replace("model.layers.3.", DRAFT): one for name, one in layer.items()}
    ones = torch.ones(64)
    weights |= {f"{DRAFT}{name}.weight": ones.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    weights |= {f"{DRAFT}eh_proj.weight": 0.1 * torch.randn(64, 128)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    return folder


def test_logprobs_are_the_policys_while_drafts_come_and_go(seen):
    (completions, metrics), (old, _) = seen["flipping"], seen["models"]
    check_logprobs(old, seen["prompts"], completions, temperature=0.8)
    assert all(len(one.tokens) == 24 for one in completions)
    assert 0 < metrics["speculation_paused"] < 1 and 0 <= metrics["speculation_acceptance"] <= 1


def test_a_refit_changes_the_policy_and_not_its_draft(seen):
    completions, _ = seen["refitted"]
    check_logprobs(seen["models"][1], seen["prompts"], completions, temperature=1.0)
    before, after = (seen[name][1]["speculation_acceptance"] for name in ("greedy", "refitted, greedy"))
    if seen["method"] == "draft_model":
        assert before == 1 > after


def test_a_draft_without_an_embedding_uses_the_policys(seen):
    assert seen["shares"] == [seen["method"] != "draft_model"]


def test_a_draft_has_as_many_positions_as_the_policy(seen):
    assert seen["positions"][0] >= 64


def test_a_draft_survives_the_sleep_of_its_engine(seen):
    assert seen["survives"] == [True]


def test_decoding_with_and_without_drafts_has_graphs(monkeypatch):
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    from nemo_rl_lite.compat.vllm import capture_plain_decoding

    monkeypatch.setattr(CudaGraphManager, "_init_candidates", CudaGraphManager._init_candidates)
    capture_plain_decoding()

    def manager(length: int) -> CudaGraphManager:
        """Return vLLM's manager for steps of up to four requests, with three drafts or of a draft."""
        made: Any = object.__new__(CudaGraphManager)
        made.cudagraph_mode, made.max_num_reqs, made.decode_query_len = CUDAGraphMode.FULL_DECODE_ONLY, 4, length
        sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16], "max_cudagraph_capture_size": 16}
        made.compilation_config, made.lora_capture_cases = SimpleNamespace(**sizes), [0]
        speculative = SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False)
        made.vllm_config = SimpleNamespace(speculative_config=speculative, num_speculative_tokens=3)
        made._candidates, made._capture_descs, made._graphs_captured = {}, {}, True
        made._lora_dispatch_map, made.use_breakable_cg = {}, False
        made._init_candidates()
        return made

    both = manager(4)
    assert both.decode_query_len == 4
    captured = both._capture_descs[CUDAGraphMode.FULL]
    assert [(one.num_reqs, one.num_tokens) for one in captured] == [(4, 16), (2, 8), (1, 4), (4, 4), (2, 2), (1, 1)]
    for requests, tokens in [(3, 4), (3, 1), (1, 1), (4, 4)]:
        found = both.dispatch(requests, requests * tokens, tokens, 0)
        assert found.cg_mode is CUDAGraphMode.FULL and found.uniform_token_count == tokens
        assert found.num_reqs >= requests
    # A draft's own steps have one token per request anyway.
    assert {one.uniform_token_count for one in manager(1)._capture_descs[CUDAGraphMode.FULL]} == {1}
