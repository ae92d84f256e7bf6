"""Replicas that exchange gradients and weights while they compute take the same steps as replicas that wait."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_lite.models.embedded import MODEL_CONFIG, build_tokenizer
from tests.functional.overlap_rank import STEPS
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

BATCH = [
    *("algorithm.num_prompts_per_step=2", "policy.train_global_batch_size=16", "refit.bucket_bytes=60000"),
    *("algorithm.loss_fn.reference_policy_kl_penalty=0.1", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"),
]
ONE, SEVERAL = ([f"policy.train_micro_batch_size={size}", f"policy.logprob_batch_size={size}"] for size in (8, 2))
DDP = "policy.megatron_cfg.distributed_data_parallel_config"
# A bucket holds a matrix or two of the test's models, so that there are many, and the last matrix has one of its own.
GRADIENTS = [f"{DDP}.overlap_grad_reduce=true", f"{DDP}.bucket_size=4000"]
BOTH = [*GRADIENTS, f"{DDP}.overlap_param_gather=true"]
STAGES = ["policy.megatron_cfg.pipeline_model_parallel_size=2"]
LORA = ["policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.dim=2"]
NOT_SHARDED = ["policy.megatron_cfg.optimizer.use_distributed_optimizer=false"]
# Each layout, and the ways of exchange that are compared with the one that does not overlap.
LAYOUTS: dict[str, tuple[int, list[str], dict[str, list[str]]]] = {
    "one micro-batch": (2, ONE, {"both": BOTH}),
    "several micro-batches": (2, SEVERAL, {"gradients": GRADIENTS, "both": BOTH, "one bucket": [BOTH[0], BOTH[2]]}),
    "moved": (2, [*SEVERAL, "offload=pinned"], {"both": BOTH}),
    "adapters": (2, [*SEVERAL, *LORA], {"both": [*BOTH, f"{DDP}.bucket_size=500"]}),
    "not sharded": (2, [*SEVERAL, *NOT_SHARDED], {"gradients": GRADIENTS}),
    "stages": (4, [*SEVERAL, *STAGES], {"both": BOTH}),
}
CASES = [
    pytest.param(layout, way, marks=[pytest.mark.slow] if ranks == 4 else [])
    for layout, (ranks, _, ways) in LAYOUTS.items()
    for way in ways
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return what all ranks found, and the exported weights, by layout and way. A number of ranks runs once."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder, model = tmp_path_factory.mktemp("overlap"), tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    # The last matrix is not the embedding, so that nothing but the logprobs asks for it. Of these sizes megatron-core
    # pads buckets, which must not move what is saved.
    odd = {"tie_word_embeddings": False, "hidden_size": 96, "intermediate_size": 150}
    Qwen3ForCausalLM(Qwen3Config.from_dict(MODEL_CONFIG | odd)).save_pretrained(model)
    build_tokenizer().save_pretrained(model)

    @cache
    def failure(ranks: int) -> AssertionError | None:
        own = {
            f"{layout} {way}": [*BATCH, f"cluster.cpu_ranks={ranks}", *overrides, *of_way]
            for layout, (count, overrides, ways) in LAYOUTS.items()
            for way, of_way in {"plain": [], **ways}.items()
            if count == ranks
        }
        try:
            run_ranks(Path(__file__).with_name("overlap_rank.py"), [str(model), str(folder), json.dumps(own)], ranks)
        except AssertionError as error:
            return error
        return None

    def read(layout: str, way: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        if error := failure(LAYOUTS[layout][0]):
            raise error
        path = folder / f"{layout} {way}".replace(" ", "-")
        return torch.load(path, weights_only=False), load_file(f"{path}.hf/model.safetensors")

    return read


@pytest.mark.parametrize(("layout", "way"), CASES)
def test_the_steps_are_those_without_overlap(outcomes, layout, way):
    (ours, our_weights), (theirs, their_weights) = outcomes(layout, way), outcomes(layout, "plain")
    for one, other in zip(ours, theirs, strict=True):
        assert (one["steps"][0] is not None) is one["place"].reports
        for own, plain in zip([*one["steps"], one["next"]], [*other["steps"], other["next"]], strict=True):
            # Some are exponentials of logprobs.
            assert own == (plain and pytest.approx(plain, rel=1e-5, abs=1e-6))
        if one["logprobs"] is not None:
            np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-5)
    assert our_weights.keys() == their_weights.keys()
    for name, weight in their_weights.items():
        np.testing.assert_allclose(our_weights[name], weight, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("layout", "way"), [*CASES, ("one micro-batch", "plain")])
def test_whoever_reads_weights_has_all_of_them(outcomes, layout, way):
    found, _ = outcomes(layout, way)
    gathers_late = way in ("both", "one bucket")
    for rank in found:
        assert rank["behind"] is gathers_late, "the steps leave nothing to gather, so that this test says nothing"
        assert len(rank["steps"]) == STEPS
        assert rank["whole in a save"] and rank["whole in a refit"] and rank["whole after the reference"]


@pytest.mark.parametrize(("layout", "way"), CASES)
def test_a_policy_resumes_from_a_save_to_the_bit(outcomes, layout, way):
    found, _ = outcomes(layout, way)
    for rank in found:
        assert np.array_equal(rank["loaded"], rank["logprobs"]) or rank["logprobs"] is rank["loaded"] is None
        assert rank["next of loaded"] == rank["next"]
