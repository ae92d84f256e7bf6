"""A mixture of experts, whole and spread over two ranks, gives what transformers gives."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.functional.ranks import run_ranks
from tests.functional.test_parallel_parity import BATCHES, PACKED, Outcome, read

pytestmark = pytest.mark.functional

SPREAD = ["cluster.cpu_ranks=2", "policy.megatron_cfg.expert_model_parallel_size=2"]
STAGES = ["cluster.cpu_ranks=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"]
LAYOUTS = {
    1: {"one rank": BATCHES},
    2: {
        "experts 2": BATCHES + SPREAD,
        "experts 2, packed": BATCHES + SPREAD + PACKED,
        "pipeline 2": BATCHES + STAGES,
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small random Qwen3 with four experts, two of them for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from nemo_rl_lite.models.embedded.build import build_tokenizer

    torch.manual_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("experts"), build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(model, tmp_path_factory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("parity")
    script = Path(__file__).with_name("policy_rank.py")
    for ranks, layouts in LAYOUTS.items():
        run_ranks(script, [str(model), str(folder), json.dumps(layouts)], ranks)
    return {name: read(folder / name.replace(" ", "-")) for layouts in LAYOUTS.values() for name in layouts}


def test_logprobs_are_those_of_transformers(outcomes, model):
    from transformers import AutoModelForCausalLM

    outcome = outcomes["one rank"]
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        logits = reference(outcome.tokens).logits / outcome.temperature
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, outcome.tokens[:, 1:, None]).squeeze(-1)
    inside = torch.arange(1, outcome.tokens.shape[1]) < outcome.lengths[:, None]
    np.testing.assert_allclose(outcome.logprobs[:, 1:], torch.where(inside, expected, 0.0).numpy(), atol=1e-5)


@pytest.mark.parametrize("layout", ["experts 2", "experts 2, packed"])
def test_experts_on_two_ranks_train_as_on_one(outcomes, layout):
    one, two = outcomes["one rank"], outcomes[layout]
    np.testing.assert_allclose(two.logprobs, one.logprobs, atol=1e-5)
    np.testing.assert_allclose(two.after, one.after, atol=1e-4)
    for ours, theirs in zip(two.metrics, one.metrics, strict=True):
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4), name
    assert two.weights.keys() == one.weights.keys()
    for name, weight in one.weights.items():
        np.testing.assert_allclose(two.weights[name], weight, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_what_a_refit_sends_is_what_the_bridge_exports(outcomes, layout):
    everyones = outcomes[layout].assembled
    assert all(same for own in everyones for same, _, _ in own)
    # Ranks exchange experts, or layers; what both have is not sent.
    collectives = [count for _, _, count in everyones[0]]
    assert all(0 < count <= 24 for count in collectives) if len(everyones) > 1 else collectives == [0, 0, 0]


@pytest.fixture(scope="module")
def of_routers(model) -> list[dict[str, float]]:
    """What training changed (router_rank.py): by default, with a rate, and with frozen routers."""
    prefix, fast = "policy.megatron_cfg", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"
    cases = [[fast], [fast, f"{prefix}.moe_router_bias_update_rate=0.01"], [fast, f"{prefix}.freeze_moe_router=true"]]
    (said,) = run_ranks(Path(__file__).with_name("router_rank.py"), [str(model), json.dumps(cases)], 1)
    return json.loads(said.splitlines()[-1])


def test_routing_changes_by_gradients_alone(of_routers):
    assert of_routers[0]["bias"] == 0 and of_routers[0]["router"] > 0


def test_a_bias_that_is_asked_to_move_leaves_the_reference_and_a_skipped_step_alone(of_routers):
    assert of_routers[1]["bias"] == pytest.approx(0.01)
    assert of_routers[1]["bias of a skipped step"] == of_routers[1]["reference"] == 0


def test_a_frozen_router_keeps_its_weights(of_routers):
    assert of_routers[2]["router"] == 0
