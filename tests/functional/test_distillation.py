"""Distillation, whole runs: the policy in this process, the teacher, of another size, in processes of its own."""

import json
import math

import pytest
import torch

from nemo_rl_lite.rollout.files import read_rollout
from tests.functional.here import run_here, train_here
from tests.functional.test_resume import assert_same_weights, metrics_of
from tests.functional.test_sft import series
from tests.metric_names import not_logged, undocumented

pytestmark = pytest.mark.functional

SHORT = [
    *("algorithm=distillation", "generation=transformers", "algorithm.max_num_steps=6"),
    *("algorithm.num_prompts_per_step=16", "policy.train_global_batch_size=64", "policy.train_micro_batch_size=32"),
    *("policy.logprob_batch_size=32", "algorithm.max_val_samples=20", "algorithm.val_period=0"),
    *("policy.megatron_cfg.optimizer.lr=1e-3", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"),
]
TOPK = ["algorithm.topk_logits_k=8", "algorithm.loss_fn.zero_outside_topk=true"]


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory):
    """An untrained model of another size, whose logits are far enough from uniform to be learnt from."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from nemo_rl_lite.models.embedded.build import build_tokenizer
    from nemo_rl_lite.models.embedded.reverse_digits import MODEL_CONFIG

    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(5)
    size = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(MODEL_CONFIG | size))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder, teacher_folder):
    folder = tmp_path_factory.mktemp("distillation") / "run"
    return folder, *train_here(folder, model_folder, *SHORT, f"teacher.model_name={teacher_folder}")


def test_the_policy_comes_nearer_to_the_teacher(run):
    _, output, metrics = run
    kl = series(metrics, "train/teacher_kl")
    assert len(kl) == 6 and min(kl) > 0 and kl[-1] < 0.7 * kl[0]
    # With one optimizer step on a rollout every ratio is 1, and the loss is the estimate itself.
    assert series(metrics, "train/loss") == pytest.approx(kl, rel=1e-4)
    assert "kl to teacher" in output and "teacher weights" in output


def test_every_metric_is_documented_and_logged(run):
    names = set().union(*run[2])
    assert undocumented(names) == [] and not_logged(names, "distillation") == []
    assert {"timing/train/teacher_logprob_inference", "offload/teacher_weights/to_device_bytes"} <= names


def test_the_teachers_logprobs_are_those_of_transformers(run, teacher_folder, model_folder):
    """Of the first rollout, whose responses the run has written down; and so is the divergence."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _, metrics = run
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    models = [AutoModelForCausalLM.from_pretrained(one) for one in (teacher_folder, model_folder)]
    sums, count = [0.0, 0.0], 0
    for row in read_rollout(folder / "rollouts" / "step-00000001-train.parquet"):
        prompt = tokenizer(f"<bos>{row['prompt'][0]['content']}=")["input_ids"]
        end = "<eos>" if row["ending"] == "stop" else ""
        sampled = tokenizer(row["response"] + end)["input_ids"]
        if len(sampled) != row["tokens"]:
            pytest.skip("a response has special tokens, which its text does not show")
        tokens = torch.tensor([prompt + sampled])
        for place, model in enumerate(models):
            with torch.no_grad():
                logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            sums[place] += logprobs.gather(1, tokens[0, len(prompt) :, None]).sum().item()
        count += len(sampled)
    teacher, student = (one / count for one in sums)
    assert series(metrics, "train/teacher_logprobs")[0] == pytest.approx(teacher, abs=1e-4)
    assert series(metrics, "train/student_logprobs")[0] == pytest.approx(student, abs=1e-4)


def test_a_run_resumes_without_the_teachers_weights(run, tmp_path, model_folder, teacher_folder):
    folder, _, _ = run
    common = [*SHORT, f"teacher.model_name={teacher_folder}", "checkpoint.save_period=3"]
    train_here(tmp_path / "halves", model_folder, *common, "algorithm.max_num_steps=3")
    saved = [file.name for file in (tmp_path / "halves" / "checkpoints").rglob("*") if "teacher" in file.name]
    output, _ = train_here(tmp_path / "halves", model_folder, *common)
    assert saved == [] and "resuming after step 3" in output
    whole, halves = metrics_of(folder), metrics_of(tmp_path / "halves")
    trained = {key: value for key, value in whole.items() if key[1].startswith("train/")}
    assert trained == {key: halves[key] for key in trained}
    assert_same_weights(folder / "hf", tmp_path / "halves" / "hf")


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_largest_logits_teach_too(tmp_path, model_folder, teacher_folder, kind):
    own = [*TOPK, f"algorithm.loss_fn.kl_type={kind}", "algorithm.max_num_steps=4"]
    # A teacher that stays on the device moves nothing.
    stays = [f"teacher.model_name={teacher_folder}", "teacher.offload=false", "algorithm.val_at_start=false"]
    _, metrics = train_here(tmp_path / "run", model_folder, *SHORT, *own, *stays)
    trained, kl = series(metrics, f"train/{kind}_kl"), series(metrics, "train/teacher_kl")
    assert trained == series(metrics, "train/loss") and trained[-1] < trained[0]
    assert all(math.isfinite(one) for one in kl) and kl[-1] < kl[0]
    names = set().union(*metrics)
    assert undocumented(names) == [] and not any(name.startswith("offload/teacher_weights") for name in names)


def test_a_teacher_of_other_tokens_is_refused(tmp_path, model_folder, teacher_folder):
    other = tmp_path / "other"
    other.mkdir()
    for file in teacher_folder.iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            tokens = json.loads(text)
            vocabulary = tokens["model"]["vocab"]
            vocabulary["5"], vocabulary["7"] = vocabulary["7"], vocabulary["5"]
            text = json.dumps(tokens).encode()
        (other / file.name).write_bytes(text)
    done = run_here(tmp_path / "run", model_folder, *SHORT, f"teacher.model_name={other}")
    assert done.returncode == 2
    assert "teacher.model_name" in done.stderr and "2 of the policy's" in done.stderr and "'5' is" in done.stderr
