"""Distillation, whole runs: the policy in this process, the teacher, of another size, in processes of its own."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_lite.workers.policy import RemoteTeacher
from tests.functional.conftest import train
from tests.functional.here import run_here, train_here
from tests.functional.ranks import run_ranks
from tests.functional.supervised import series
from tests.functional.teacher_rank import rows
from tests.functional.test_resume import assert_same_weights, metrics_of
from tests.metric_names import not_logged, undocumented

pytestmark = pytest.mark.functional

SHORT = [
    *("algorithm=distillation", "generation=transformers", "algorithm.max_num_steps=6"),
    *("algorithm.num_prompts_per_step=16", "policy.train_global_batch_size=64", "policy.train_micro_batch_size=32"),
    *("policy.logprob_batch_size=32", "algorithm.max_val_samples=20", "algorithm.val_period=0"),
    *("policy.megatron_cfg.optimizer.lr=1e-3", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"),
]
PARALLEL = "teacher.megatron_cfg"
TOPK = ["algorithm.topk_logits_k=8", "algorithm.loss_fn.zero_outside_topk=true"]


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory):
    """An untrained model of another size, whose logits are far enough from uniform to be learnt from."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from nemo_rl_lite.models.embedded import MODEL_CONFIG, build_tokenizer

    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(5)
    size = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(MODEL_CONFIG | size))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
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


def test_each_source_has_the_scores_of_a_run_with_its_teacher_alone(
    tmp_path, monkeypatch, model_folder, teacher_folder
):
    seen, score = [], RemoteTeacher.scored

    def noted(self, rows, sources):
        seen.append((sources, score(self, rows, sources)))
        return seen[-1][1]

    monkeypatch.setattr(RemoteTeacher, "scored", noted)
    common = [*SHORT, *TOPK, "algorithm.max_num_steps=1", "data.sources.first.weight=1", "data.sources.second.weight=2"]
    both = [f"teacher.model_name={teacher_folder}", f"data.sources.second.teacher.model_name={model_folder}"]
    runs = [both, *([f"teacher.model_name={one}"] for one in (teacher_folder, model_folder))]
    metrics = [train_here(tmp_path / str(n), model_folder, *common, *own)[1] for n, own in enumerate(runs)]
    (sources, mixed), *alone = seen
    assert {*sources} == {"first", "second"}
    for row, source, *others in zip(mixed, sources, *(one for _, one in alone), strict=True):
        own, other = others if source == "first" else others[::-1]
        assert row.tokens.tolist() == own.tokens.tolist()
        np.testing.assert_allclose(row.teacher_logprobs, own.teacher_logprobs, atol=1e-5)
        np.testing.assert_allclose(row.teacher_topk_logits, own.teacher_topk_logits, atol=1e-4)
        assert not np.allclose(row.teacher_logprobs, other.teacher_logprobs, atol=1e-2)
    # Each teacher is loaded once.
    (moved,), *single = (series(one, "offload/teacher_weights/to_device_bytes") for one in metrics)
    assert moved == sum(one for (one,) in single)


def test_rollout_workers_give_their_rows_to_the_teachers(tmp_path, model_folder, teacher_folder):
    own = [*SHORT, *TOPK, "algorithm.max_num_steps=2", "generation.colocated.enabled=false", "logger.plots=false"]
    own += [f"teacher.model_name={teacher_folder}", "generation.data_parallel_size=2", "cluster.cpu_ranks=2"]
    own += ["data.sources.first.weight=1", f"data.sources.second.teacher.model_name={model_folder}"]
    train_here(tmp_path / "alone", model_folder, *own, elsewhere=["policy", "generation"])
    train(tmp_path / "run", model_folder, *own, "algorithm.rollouts.num_workers=2")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "alone")


LAYOUTS = {
    "one rank": [],
    "tensor 2": ["cluster.cpu_ranks=2", f"{PARALLEL}.tensor_model_parallel_size=2"],
    "pipeline 2": ["cluster.cpu_ranks=2", f"{PARALLEL}.pipeline_model_parallel_size=2"],
    "data 2, packed": ["cluster.cpu_ranks=2", "policy.sequence_packing.enabled=true", "teacher.logprob_mb_tokens=40"],
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_teacher_says_in_every_layout_what_transformers_says(tmp_path, teacher_folder, ranks):
    """At the sampling temperature, also after its weights have left the device."""
    from transformers import AutoModelForCausalLM

    own = ["generation.temperature=0.7", "algorithm.topk_logits_k=5", "policy.sequence_length_round=8"]
    layouts = {name: [*own, *more] for name, more in LAYOUTS.items() if (len(more) > 0) is (ranks == 2)}
    script = Path(__file__).with_name("teacher_rank.py")
    run_ranks(script, [str(teacher_folder), str(tmp_path), json.dumps(layouts)], ranks)
    model, expected, largest = AutoModelForCausalLM.from_pretrained(teacher_folder), [], []
    for row in rows():
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / 0.7
        chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        expected.append(np.concatenate([[0.0], chosen.numpy()]))
        largest.append(logits.topk(5))
    for name in layouts:
        replicas = sorted(torch.load(tmp_path / name.replace(" ", "-"), weights_only=False), key=lambda one: one[0])
        for time in range(2):
            found = [scores[time] for _, scores, _ in replicas]
            logprobs = np.concatenate([one.logprobs for one in found])
            np.testing.assert_allclose(logprobs, np.concatenate(expected), atol=1e-5, err_msg=name)
            values, ids = (
                np.concatenate([getattr(one, kind) for one in found]) for kind in ("topk_logits", "topk_ids")
            )
            followed = logprobs != 0
            torch.testing.assert_close(torch.from_numpy(values[followed]), torch.cat([one.values for one in largest]))
            assert (ids[followed] == torch.cat([one.indices for one in largest]).numpy()).all(), name
        # The copy in host memory is made once.
        assert replicas[0][2] == ["teacher_weights/to_host", *["teacher_weights/to_device"] * 2], name


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


def test_the_largest_logits_teach_too(tmp_path, model_folder, teacher_folder):
    own = [*TOPK, "algorithm.loss_fn.kl_type=reverse", "algorithm.max_num_steps=4"]
    # A teacher that stays on the device moves nothing.
    stays = [f"teacher.model_name={teacher_folder}", "teacher.offload=false", "algorithm.val_at_start=false"]
    _, metrics = train_here(tmp_path / "run", model_folder, *SHORT, *own, *stays)
    trained, kl = series(metrics, "train/reverse_kl"), series(metrics, "train/teacher_kl")
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
