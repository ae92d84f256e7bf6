"""Four ranks write and read each byte of a checkpoint once, and all of them notice a damaged one."""

import json
from pathlib import Path

import pytest
import torch

from tests.functional.ranks import run_ranks

pytestmark = pytest.mark.functional

SCRIPT = Path(__file__).with_name("checkpoint_io_rank.py")
FOUR = ["cluster.cpu_ranks=4", "policy.train_global_batch_size=8"]
MODEL = Path("model") / "model.safetensors"
CASES = {"data-4": FOUR, "data-2-tensor-2": [*FOUR, "policy.megatron_cfg.tensor_model_parallel_size=2"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What each rank counted, in <case>.json, and the checkpoint, in <case>/, whose index is small."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from nemo_rl_lite.models.embedded import MODEL_CONFIG, build_tokenizer

    output = tmp_path_factory.mktemp("io") / "counts"
    output.mkdir()
    model = (output.parent / MODEL).parent
    config = AutoConfig.for_model(**MODEL_CONFIG | {"hidden_size": 512, "intermediate_size": 2048})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    run_ranks(SCRIPT, [str(model), str(output), json.dumps(CASES)], ranks=4)
    return output


@pytest.mark.parametrize("case", CASES)
def test_each_byte_is_written_and_read_once(folder, case):
    counts = json.loads((folder / f"{case}.json").read_text())
    size = sum(file.stat().st_size for file in (folder / case).rglob("*") if file.is_file())
    for kind in ("written", "read"):
        assert 1 <= sum(own[kind] for own in counts) / size <= 1.05
    # Each rank has a share.
    assert max(own["written"] for own in counts) < 0.3 * size


def test_another_layout_reads_each_byte_once(folder):
    counts = json.loads((folder / "data-2-tensor-2.json").read_text())
    size = sum(file.stat().st_size for file in (folder / "data-4").rglob("*") if file.is_file())
    assert 1 <= sum(own["read from data-4"] for own in counts) / size <= 1.05


@pytest.mark.parametrize(("case", "readers"), [("data-4", 1), ("data-2-tensor-2", 2)])
def test_a_replica_reads_the_weights_of_the_start(folder, case, readers):
    """megatron-bridge reads a weight on each tensor-parallel rank of it."""
    counts = [own["weights"] for own in json.loads((folder / f"{case}.json").read_text())]
    size = (folder.parent / MODEL).stat().st_size
    assert sum(1 for count in counts if count) == readers
    assert 0.9 * size <= max(counts) and sum(counts) <= 1.05 * readers * size


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_name_the_file_that_one_of_them_finds_damaged(folder, case):
    said = {own["said"] for own in json.loads((folder / f"{case}.json").read_text())}
    assert len(said) == 1 and "policy/__1_0.distcp has changed since it was saved" in said.pop()
