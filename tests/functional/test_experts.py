"""A mixture of experts, whole and spread over two ranks, gives what transformers gives."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.functional.conftest import random_experts
from tests.functional.ranks import run_ranks
from tests.functional.test_parallel_parity import BATCHES, PACKED, Outcome, read

pytestmark = pytest.mark.functional

SPREAD = ["cluster.cpu_ranks=2", "policy.megatron_cfg.expert_model_parallel_size=2"]
HALVES = ["cluster.cpu_ranks=2", "policy.megatron_cfg.expert_tensor_parallel_size=2"]
STAGES = ["cluster.cpu_ranks=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"]
CHUNKS = "policy.megatron_cfg.virtual_pipeline_model_parallel_size"
REPLAYED = [*BATCHES, "policy.router_replay.enabled=true"]
RECOMPUTED = ["policy.megatron_cfg.activation_checkpointing=true"]
PARTS = [
    *RECOMPUTED,
    "policy.megatron_cfg.recompute_granularity=selective",
    "policy.megatron_cfg.recompute_modules=[moe]",
]
LAYOUTS = {
    1: {
        "one rank": BATCHES,
        "replayed": REPLAYED,
        "replayed, recomputed": REPLAYED + RECOMPUTED,
        "replayed, experts recomputed": REPLAYED + PARTS,
        "replayed, packed": REPLAYED + PACKED,
    },
    2: {
        "replayed, data 2": [*REPLAYED, "cluster.cpu_ranks=2"],
        "replayed, experts 2, packed": REPLAYED + SPREAD + PACKED,
        "replayed, pipeline 2, recomputed": REPLAYED + STAGES + RECOMPUTED,
        "replayed, pipeline 2, experts recomputed": REPLAYED + STAGES + PARTS,
        "replayed, 2 chunks, recomputed": [*REPLAYED, *STAGES, *RECOMPUTED, f"{CHUNKS}=2"],
        "experts 2": BATCHES + SPREAD,
        "experts 2, packed": BATCHES + SPREAD + PACKED,
        "halves of experts": BATCHES + HALVES,
        "halves of experts, packed": BATCHES + HALVES + PACKED,
        "pipeline 2": BATCHES + STAGES,
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small random Qwen3 with four experts, two of them for each token."""
    own = {"num_hidden_layers": 4, "num_experts": 4, "intermediate_size": 128, "tie_word_embeddings": False}
    return random_experts(tmp_path_factory.mktemp("experts"), **own)


@pytest.fixture(scope="module")
def outcomes(model, tmp_path_factory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("parity")
    script = Path(__file__).with_name("policy_rank.py")
    for ranks, layouts in LAYOUTS.items():
        run_ranks(script, [str(model), str(folder), json.dumps(layouts)], ranks)
    return {name: read(folder / name.replace(" ", "-")) for layouts in LAYOUTS.values() for name in layouts}


@pytest.mark.parametrize("layout", ["one rank", "replayed"])
def test_logprobs_are_those_of_transformers(layout, outcomes, model):
    """Where experts are replayed, with a router that chose the same."""
    from transformers import AutoModelForCausalLM

    outcome = outcomes[layout]
    with torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for layer, block in enumerate(reference.model.layers) if outcome.experts is not None else ():
            block.mlp.gate.register_forward_hook(Choosing(outcome.experts[:, :, layer].flatten(0, 1).long()))
        logits = reference(outcome.tokens).logits / outcome.temperature
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, outcome.tokens[:, 1:, None]).squeeze(-1)
    inside = torch.arange(1, outcome.tokens.shape[1]) < outcome.lengths[:, None]
    np.testing.assert_allclose(outcome.logprobs[:, 1:], torch.where(inside, expected, 0.0).numpy(), atol=1e-5)


class Choosing:
    """A hook that lets a router of transformers choose the given experts [tokens, k], where they are given."""

    def __init__(self, experts: torch.Tensor):
        self.experts = experts

    def __call__(self, router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> tuple:
        logits, _, own = output
        chosen = torch.where(self.experts < 0, own, self.experts)
        return logits, logits.gather(-1, chosen).softmax(-1), chosen


def test_forged_experts_are_others_than_the_routers_choose(outcomes):
    assert np.abs(outcomes["replayed"].logprobs - outcomes["one rank"].logprobs).max() > 0.1


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts if "replayed," in name])
def test_replayed_experts_do_not_depend_on_the_layout(outcomes, layout):
    """Nor on recomputation. After two steps all weights agree: the routers got the same gradient, too."""
    whole, own = outcomes["replayed"], outcomes[layout]
    assert np.array_equal(own.reference, own.logprobs)
    np.testing.assert_allclose(own.logprobs, whole.logprobs, atol=1e-5)
    np.testing.assert_allclose(own.after, whole.after, atol=1e-4)
    for ours, theirs in zip(own.metrics, whole.metrics, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    for name, weight in whole.weights.items():
        np.testing.assert_allclose(own.weights[name], weight, atol=1e-4, err_msg=name)


def test_the_routers_learn_from_replayed_experts(outcomes, model):
    from safetensors.torch import load_file

    started, after = load_file(model / "model.safetensors"), outcomes["replayed"].weights
    gates = [name for name in after if name.endswith("mlp.gate.weight")]
    assert len(gates) == 4 and all((after[name] - started[name]).abs().max() > 1e-5 for name in gates)


@pytest.mark.parametrize("layout", ["experts 2", "experts 2, packed", "halves of experts", "halves of experts, packed"])
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


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts if "replayed" not in name])
def test_what_a_refit_sends_is_what_the_bridge_exports(outcomes, layout):
    everyones = outcomes[layout].assembled
    assert all(same for own in everyones for same, _, _ in own)
    # Ranks exchange experts, or layers; what both have is not sent.
    for _, buckets, collectives in everyones[0]:
        assert 0 < collectives <= 2 * buckets if len(everyones) > 1 else collectives == 0


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
