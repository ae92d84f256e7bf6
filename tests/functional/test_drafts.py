"""Drafts with a model: exact logprobs while drafts come and go, and weights that refits do not change."""

import json
import pickle
import shutil
from pathlib import Path

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
        head = eagle3_head(folder / "head", json.loads((model_folder / "config.json").read_text()), layers=(1, 2, 3))
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
        (folder / f"source{producer.name}").write_bytes(pickle.dumps(producer.source))
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


def test_a_draft_survives_the_sleep_of_its_engine(seen):
    assert seen["survives"] == [True]
