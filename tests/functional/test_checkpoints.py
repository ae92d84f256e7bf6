"""A policy that resumes from disk takes the same steps as one that was not interrupted."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.conftest import random_experts
from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

SCRIPT = Path(__file__).with_name("checkpoint_rank.py")
TENSOR = ["cluster.cpu_ranks=2", "policy.megatron_cfg.tensor_model_parallel_size=2"]
PIPELINE = ["cluster.cpu_ranks=2", "policy.megatron_cfg.pipeline_model_parallel_size=2"]
DATA = ["cluster.cpu_ranks=2"]
PEFT = "policy.megatron_cfg.peft"
LORA = [f"{PEFT}.enabled=true", f"{PEFT}.dim=2", f"{PEFT}.dropout=0.2"]
OPTIMIZER = "policy.megatron_cfg.optimizer"
SGD = [f"{OPTIMIZER}.optimizer=sgd", f"{OPTIMIZER}.sgd_momentum=0.9", f"{OPTIMIZER}.use_distributed_optimizer=false"]
HOST = "offload=cpu_optimizer"
SCHEDULER = "policy.megatron_cfg.scheduler"
CHANGED = [f"{OPTIMIZER}.lr=0.01", f"{OPTIMIZER}.min_lr=0.001", f"{OPTIMIZER}.adam_beta1=0.5"]
CHANGED += [f"{SCHEDULER}.lr_warmup_iters=0", f"{SCHEDULER}.lr_decay_style=linear", f"{SCHEDULER}.lr_decay_iters=10"]
HALF = ["policy.precision=bfloat16"]
CHUNKS = [*PIPELINE, "policy.megatron_cfg.virtual_pipeline_model_parallel_size=2"]
# Name: overrides, and whose checkpoint it resumes from (none: it saves one).
ON_TWO = {
    "tensor": [TENSOR, None],
    "tensor again": [TENSOR, "tensor"],
    "pipeline from tensor": [PIPELINE, "tensor"],
    "data from tensor": [DATA, "tensor"],
    "chunks": [CHUNKS, None],
    "chunks again": [CHUNKS, "chunks"],
    "tensor from chunks": [TENSOR, "chunks"],
    "chunks from tensor": [CHUNKS, "tensor"],
    "lora": [[*DATA, *LORA], None],
    "lora again": [[*DATA, *LORA], "lora"],
    "data": [DATA, None],
    "data again": [DATA, "data"],
    "tensor from data": [TENSOR, "data"],
}
ON_ONE = {
    "one from tensor": [[], "tensor"],
    "changed from tensor": [CHANGED, "tensor"],
    "one from data": [[], "data"],
    "sgd": [SGD, None],
    "sgd again": [SGD, "sgd"],
    "half": [HALF, None],
    "half again": [HALF, "half"],
    "half from tensor": [HALF, "tensor"],
    "one from half": [[], "half"],
}

ON_HOST = {
    "on the host": [[*DATA, *HALF, HOST], None],
    "on the host again": [[*DATA, *HALF, HOST], "on the host"],
    "device from on the host": [[*DATA, *HALF], "on the host"],
    "changed from on the host": [[*DATA, *HALF, HOST, *CHANGED], "on the host"],
}

EXPERTS = [*DATA, "policy.megatron_cfg.expert_model_parallel_size=2"]
WITH_EXPERTS = {
    "replicas": [DATA, None],
    "experts": [EXPERTS, None],
    "experts from replicas": [EXPERTS, "replicas"],
    "replicas from experts": [DATA, "experts"],
    "halves from replicas": [[*DATA, "policy.megatron_cfg.expert_tensor_parallel_size=2"], "replicas"],
}
EXPERTS_ON_HOST = {
    "experts on the host": [[*EXPERTS, *HALF, HOST], None],
    "replicas from experts on the host": [[*DATA, *HALF, HOST], "experts on the host"],
}
UNDIVIDED = [f"{OPTIMIZER}.use_distributed_optimizer=false"]
REFUSED = {
    "undivided": [[*DATA, *UNDIVIDED], None],
    "experts from undivided": [[*EXPERTS, *UNDIVIDED], "undivided"],
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A small model with experts."""
    own = {"num_hidden_layers": 2, "num_experts": 4, "intermediate_size": 128, "tie_word_embeddings": False}
    return random_experts(tmp_path_factory.mktemp("experts"), **own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder, experts):
    """What each case measured, in <case>.json, and its weights after the last step, in <case>.hf/."""
    output = tmp_path_factory.mktemp("checkpoints")
    run_ranks(SCRIPT, [str(model_folder), str(output), json.dumps(ON_TWO)], ranks=2)
    run_ranks(SCRIPT, [str(model_folder), str(output), json.dumps(ON_ONE)], ranks=1)
    on_host = SCRIPT.with_name("cpu_optimizer_rank.py")
    run_ranks(on_host, [str(model_folder), str(output), json.dumps(ON_HOST)], ranks=2)
    run_ranks(SCRIPT, [str(experts), str(output), json.dumps(WITH_EXPERTS)], ranks=2)
    run_ranks(on_host, [str(experts), str(output), json.dumps(EXPERTS_ON_HOST)], ranks=2)
    return output


def steps(folder, case):
    """Loss and gradient norm of each step, replicas' shares of the loss added up."""
    replicas = [own["steps"] for own in json.loads((folder / f"{case}.json").read_text())]
    return [(sum(one["loss"] for one in step), step[0]["grad_norm"]) for step in zip(*replicas, strict=True)]


def weights(folder, case):
    return load_file(folder / f"{case}.hf" / "model.safetensors")


@pytest.mark.parametrize("case", ["tensor", "chunks", "lora", "data", "sgd", "half", "on the host"])
def test_in_the_same_layout_it_goes_on_bit_for_bit(folder, case):
    assert steps(folder, f"{case} again") == steps(folder, case)
    own, expected = weights(folder, f"{case} again"), weights(folder, case)
    assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)


@pytest.mark.parametrize(
    "case",
    [
        *("pipeline from tensor", "data from tensor", "one from tensor"),
        *("tensor from chunks", "chunks from tensor"),
        *("one from data", "tensor from data", "device from on the host"),
        *("experts from replicas", "replicas from experts", "halves from replicas"),
    ],
)
def test_another_layout_goes_on_from_it(folder, case):
    saved_by = case.split(" from ")[1]
    assert torch.allclose(torch.tensor(steps(folder, case)), torch.tensor(steps(folder, saved_by)), atol=1e-5)
    own, expected = weights(folder, case), weights(folder, saved_by)
    assert all(torch.allclose(own[name], expected[name], atol=1e-5) for name in expected)


@pytest.mark.parametrize("saved_by", ["tensor", "on the host"])
def test_it_goes_on_with_the_settings_that_it_is_given(folder, saved_by):
    """Two of ten steps of the schedule are done; the weights are those that were saved."""
    (replica, *_) = json.loads((folder / f"changed from {saved_by}.json").read_text())
    rates = [step["lr"] for step in replica["steps"]]
    assert rates == pytest.approx([0.001 + 0.009 * (10 - done) / 10 for done in (2, 3)])
    (loss, _), (later, _) = steps(folder, f"changed from {saved_by}")
    (expected, _), (other, _) = steps(folder, saved_by)
    assert loss == pytest.approx(expected, rel=1e-4) and abs(later - other) > 1e-3


@pytest.mark.parametrize("case", ["half from tensor", "one from half", "replicas from experts on the host"])
def test_another_precision_goes_on_from_it_as_far_as_it_rounds_alike(folder, case):
    saved_by = case.split(" from ")[1]
    assert torch.allclose(torch.tensor(steps(folder, case)), torch.tensor(steps(folder, saved_by)), rtol=5e-3)
    own, expected = weights(folder, case), weights(folder, saved_by)
    assert all(torch.allclose(own[name].float(), expected[name].float(), atol=1e-3) for name in expected)


def test_expert_parallelism_without_a_distributed_optimizer_is_kept(tmp_path, experts):
    with pytest.raises(AssertionError, match=r"checkpoint.s policy\.megatron_cfg\.expert_model_parallel"):
        run_ranks(SCRIPT, [str(experts), str(tmp_path), json.dumps(REFUSED)], ranks=2)


@pytest.mark.parametrize("case", ["tensor", "lora", "sgd", "half"])
def test_a_step_without_finite_gradients_is_left_out_on_every_rank(folder, case):
    for own in json.loads((folder / f"{case}.json").read_text()):
        assert own["after a skipped step"] == {"same": True, "counted": True}


@pytest.mark.parametrize("case", ["tensor", "lora", "sgd", "half"])
def test_where_one_rank_cannot_write_all_say_so_and_the_next_save_is_whole(folder, case):
    for cause, own in (("a full disk", "Worker failure"), ("no host memory", "copies of a checkpoint")):
        said = [one[cause] for one in json.loads((folder / f"{case}.json").read_text())]
        assert all(re.search(f"{own}|another rank could not write", line) for line in said)
        assert any(own in line for line in said)


def test_of_a_model_with_adapters_these_alone_are_kept(folder):
    size = {case: sum(file.stat().st_size for file in (folder / case).iterdir()) for case in ("lora", "tensor")}
    assert size["lora"] < size["tensor"] / 5
