"""`nrl-lite plan` and `train --dry-run`."""

import json
import re
import subprocess
import sys

import huggingface_hub.constants
import pytest
import yaml

from nemo_rl_lite import plan
from nemo_rl_lite.models.shape import KNOWN_MODELS, NoModelError
from nemo_rl_lite.run.command import launch
from tests.unit.validation.test_compose import HEAVY


def ends_with(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        plan.main(arguments)
    return end.value.code, *capsys.readouterr()


def test_it_says_whether_it_fits(capsys):
    recipe = ["recipes=grpo-qwen3-8b-1n8g-tp2", "--gpu", "H100"]
    status, text, _ = ends_with(recipe, capsys)
    assert status == 0 and "\nfits: " in text and "largest policy.sequence_packing.train_mb_tokens" in text
    status, text, _ = ends_with([*recipe, "--gpu", "24GiB"], capsys)
    assert status == 1 and "DOES NOT FIT" in text and "would fit: " in text
    status, text, _ = ends_with([*recipe, "--host-memory", "10GiB"], capsys)
    assert status == 1 and "HOST MEMORY IS TOO SMALL" in text


APART = [
    *("recipes=grpo-qwen3-8b-1n8g-tp2", "offload=none", "generation.colocated.enabled=false"),
    *("policy.sequence_packing.train_mb_tokens=8192", "policy.megatron_cfg.activation_checkpointing=true"),
    *("generation.colocated.resources.gpus_per_node=4", "--gpu", "H200"),
]


def test_it_says_who_waits_for_whom(capsys):
    _, text, _ = ends_with(APART, capsys)
    assert "4 + 4 (now)" in text and re.search(r"engines \d+%", text) and "responses of 1536" in text
    _, text, _ = ends_with([*APART, "--mean-length", "300"], capsys)
    assert "responses of 300, the longest of 3072 (from --mean-length)" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*APART, "--mean-length", "4000"], "--mean-length = '4000'"),
    ],
)
def test_lengths_that_cannot_be_used(arguments, words, capsys):
    status, _, error = ends_with(arguments, capsys)
    assert status == 2 and words in error


def test_it_suggests_fewer_layers_in_the_last_pipeline_stage(capsys):
    """Each stage has 8 layers, and the last one the LM head: 9, 9, 9 and 5 take less time."""
    sizes = "policy.megatron_cfg.{}={}"
    deep = ["recipes=grpo-llama3.1-8b-1n8g-pp2", sizes.format("pipeline_model_parallel_size", 4), "--gpu", "H100"]
    suggested = sizes.format("num_layers_in_last_pipeline_stage", 5)
    _, text, _ = ends_with(deep, capsys)
    assert f"10% less time with {suggested}:" in text
    for other in (suggested, sizes.format("virtual_pipeline_model_parallel_size", 2)):
        _, text, _ = ends_with([*deep, other], capsys)
        assert "less time with" not in text


def test_a_mistake_is_one_line(capsys, tmp_path):
    assert ends_with(["policy.nothing=1"], capsys)[0] == 2
    status, _, error = ends_with(["--gpu", "H1000"], capsys)
    assert status == 2 and "neither a known GPU" in error
    status, _, error = ends_with(["--model-config", str(tmp_path / "none.json")], capsys)
    assert status == 1 and "none.json" in error
    for content in ('{"eos_token_id": 0}', "[]"):
        (tmp_path / "generation_config.json").write_text(content)
        status, _, error = ends_with(["--model-config", str(tmp_path / "generation_config.json")], capsys)
        assert status == 1 and "not that of a text model" in error


REFUSED = {
    "is quantized (config.json: quantization_config, awq)": {"quantization_config": {"quant_method": "awq"}},
    "is quantized (config.json: quantization_config, fp8)": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    },
    "names no causal language model": {"architectures": ["Qwen3ForSequenceClassification"]},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_model_that_cannot_be_trained_has_no_plan(words, capsys, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(KNOWN_MODELS["Qwen/Qwen3-8B"] | REFUSED[words]))
    status, _, error = ends_with(["--model-config", str(file)], capsys)
    assert status == 1 and str(file) in error and words in error
    status, _, error = ends_with(["--model-config", str(file), "policy.model_name=Qwen/Qwen3-8B"], capsys)
    assert status == 2 and "conflicts with policy.model_name" in error


def test_a_models_config_alone_is_enough(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(KNOWN_MODELS["Qwen/Qwen3-14B"]))
    assert plan.find_shape("someone/elses", file) == plan.find_shape("Qwen/Qwen3-14B")


def test_a_model_that_nobody_has_is_told_so(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NoModelError, match="--model-config"):
        plan.find_shape("nobody/nothing-at-all")


def test_the_recipes_model_need_not_be_made_yet(capsys, tmp_path, monkeypatch):
    def asked(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", asked)
    recipe = ["recipes=grpo-smollm2-135m-1n1g", "--gpu", "H100"]
    status, text, _ = ends_with(recipe, capsys)
    assert status == 0 and "HuggingFaceTB/SmolLM2-135M-Instruct (135 M parameters)" in text
    status, _, error = ends_with([*recipe, "policy.lr=1"], capsys)
    assert status == 2 and "policy.lr" in error and "policy.model_name" not in error
    status, _, error = ends_with([*recipe, "policy.model_name=models/mine"], capsys)
    assert status == 2 and "policy.model_name = 'models/mine'" in error


def test_a_plan_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from nemo_rl_lite import plan\n"
        "try: plan.main(['recipes=grpo-qwen3-8b-1n8g-tp2'])\n"
        f"finally: sys.stderr.write(str([name for name in {HEAVY} if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]")


def test_a_dry_run_goes_with_no_flag_that_prints(capsys):
    with pytest.raises(SystemExit) as end:
        launch(["--dry-run", "--cfg", "job"])
    assert end.value.code == 2 and "--dry-run --cfg job" in capsys.readouterr().err


def test_hydra_prints_the_files_that_the_run_would_have(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train"])
    launch(["data.train_path=rows.jsonl", "cluster.gpus_per_node=1", "--cfg", "job"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["data"]["name"], printed["policy"]["precision"]) == ("file", "bfloat16")
