"""Where a run begins."""

import dataclasses
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from nemo_rl_lite.checkpoint.resume import CHECKPOINTS, Start, checkpoint_store, find_start, locate
from nemo_rl_lite.checkpoint.store import POLICY
from nemo_rl_lite.errors import CheckpointError, ConfigError
from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.run.jobs import GRPOJob, SupervisedJob
from nemo_rl_lite.validation.compose import compose_config

DISTRIBUTED = "policy.megatron_cfg.optimizer.use_distributed_optimizer"


def start(folder, *overrides):
    config = compose_config(overrides)
    return find_start(config, dataclasses.asdict(config), folder)


def save(folder, step, *overrides):
    config = compose_config(overrides)
    store = checkpoint_store(config, folder)
    (store.begin(step) / POLICY).mkdir()
    return store.finish(step, {}, {"config": dataclasses.asdict(config)})


ROWS = {"rows": 400, "sha256": "a"}
MORE = ("algorithm.max_num_steps: 6 -> 8",)


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        (ROWS, ROWS, []),
        ({}, ROWS, []),
        (ROWS, {"rows": 363, "sha256": "b"}, ["400 then, 363 now"]),
        (ROWS, {"rows": 400, "sha256": "b"}, ["400 then, 400 now"]),
        (ROWS, {}, ["a generated task now"]),
        ({"validation": ROWS}, {"validation": {"rows": 30, "sha256": "c"}}, ["held-out rows (400 then, 30 now)"]),
        (ROWS | {"validation": ROWS}, ROWS, []),
        (ROWS, ROWS | {"validation": ROWS}, []),
    ],
)
def test_other_rows_than_the_checkpoints_are_told(saved, now, said):
    lines = list(Start(5, data=saved).data_lines(now))
    assert len(lines) == len(said) and all(
        one in line and "step" in line for one, line in zip(said, lines, strict=True)
    )


@pytest.mark.parametrize(
    ("steps", "changes", "is_done"),
    [(3, MORE, False), (4, (), False), (4, MORE, True), (5, (), True)],
)
def test_more_steps_than_the_epochs_have_are_refused(steps, changes, is_done):
    config = compose_config(["algorithm=sft", "algorithm.max_num_epochs=1", "algorithm.max_num_steps=8"])
    job = SimpleNamespace(_config=config, _total=4, _data=ROWS)
    with pytest.raises(ConfigError, match="max_num_epochs=2") if is_done else nullcontext():
        assert not list(SupervisedJob.resume_lines(job, Start(steps, changes=changes)))


MIXED = {"sources": {"a": {"position": 9}}, "ahead": [[["a", 9]]]}


@pytest.mark.parametrize(
    ("sources", "saved", "said"),
    [
        ([], {"position": 9, "ahead": [[9]]}, ["400 then"]),
        (["data.sources.a.weight=1"], MIXED, ["400 then"]),
        (["data.sources.a.weight=1"], {"position": 9, "ahead": [[9]]}, ["only this run has data.sources: step 6"]),
        ([], MIXED, ["only the checkpoint has data.sources: step 6"]),
    ],
)
def test_an_order_of_sources_is_for_runs_with_sources(sources, saved, said):
    job = object.__new__(GRPOJob)
    job._config, job._total, job._data = compose_config(sources), 8, {"rows": 30, "sha256": "b"}
    lines = list(job.resume_lines(Start(5, rollouts=saved, data=ROWS)))
    assert len(lines) == 1 and said[0] in lines[0]
    assert not any("sources" in line for line in job.resume_lines(Start()))


def test_without_a_checkpoint_it_is_the_beginning(tmp_path):
    assert start(tmp_path) == Start(0, None, ())


def test_the_newest_of_the_runs_own_comes_first(tmp_path):
    save(tmp_path / "other", 30)
    save(tmp_path / "run", 10)
    newest = save(tmp_path / "run", 20)
    assert start(tmp_path / "run", f"checkpoint.resume_from={tmp_path / 'other'}") == Start(20, newest.path / POLICY)


@pytest.mark.parametrize("of_one", [False, True])
def test_another_run_or_one_of_its_checkpoints_can_be_named(tmp_path, of_one):
    saved = save(tmp_path / "other", 30)
    named = saved.path if of_one else tmp_path / "other"
    more = ["algorithm.max_num_steps=40", f"checkpoint.resume_from={named}"]
    assert start(tmp_path / "run", *more).steps == 30
    with pytest.raises(ConfigError, match=r"has taken 30 steps already\n.*fix: algorithm.max_num_steps=40"):
        start(tmp_path / "run", more[1])


def test_a_run_that_has_only_its_ending_left_may_resume(tmp_path):
    save(tmp_path, 30)
    assert start(tmp_path).steps == 30
    with pytest.raises(ConfigError, match=r"algorithm\.max_num_steps = 20"):
        start(tmp_path, "algorithm.max_num_steps=20")


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    (tmp_path / CHECKPOINTS / ".step-00000010").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume_from .*\n.*has no complete checkpoint"):
        start(tmp_path / "run", f"checkpoint.resume_from={tmp_path}")
    assert locate(tmp_path) is None


def test_what_has_changed_is_told_key_by_key_but_not_what_no_result_depends_on(tmp_path):
    save(tmp_path, 10)
    changed = ["policy.megatron_cfg.optimizer.lr=1e-5", "algorithm.max_num_steps=99"]
    free = ["logger.log_samples=9", "cluster.max_restarts=1", "checkpoint.save_period=7"]
    assert start(tmp_path, *changed, *free).changes == (
        "algorithm.max_num_steps: 30 -> 99",
        "policy.megatron_cfg.optimizer.lr: 0.0003 -> 1e-05",
    )


def test_a_value_that_auto_resolved_to_is_no_change(tmp_path):
    key = "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce"
    save(tmp_path, 10, f"{key}=false")
    assert not start(tmp_path, f"{key}=auto").changes
    assert start(tmp_path, f"{key}=true").changes == (f"{key}: False -> True",)


@pytest.mark.parametrize(
    ("override", "key"), [("algorithm=sft", "algorithm.name"), ("policy.megatron_cfg.peft.dim=4", "peft.dim")]
)
def test_a_checkpoint_of_another_kind_of_training_is_an_error(tmp_path, override, key):
    save(tmp_path, 10)
    with pytest.raises(ConfigError, match=f"{key} = .*\n.*was saved with"):
        start(tmp_path, override)


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("policy.megatron_cfg.tensor_model_parallel_size", 1, 2),
        ("policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce", "auto", True),
    ],
    ids=["tensor", "buckets"],
)
def test_another_layout_of_the_optimizer_goes_on(tmp_path, key, before, now):
    ranks = ["cluster.cpu_ranks=2", "policy.train_micro_batch_size=64"]
    save(tmp_path, 10, *ranks)
    assert start(tmp_path, *ranks, f"{key}={now}").changes == (f"{key}: {before!r} -> {now!r}",)


@pytest.mark.parametrize(
    ("saved_with", "goes_on_with", "is_read"),
    [
        ([], [], True),
        ([f"{DISTRIBUTED}=false"], [f"{DISTRIBUTED}=false"], False),
        ([], [f"{DISTRIBUTED}=false"], False),
    ],
    ids=["by parameter", "not distributed", "no longer distributed"],
)
def test_another_precision_needs_optimizer_states_by_parameter(tmp_path, saved_with, goes_on_with, is_read):
    save(tmp_path, 10, *saved_with)
    half = [*goes_on_with, "policy.precision=bfloat16"]
    if is_read:
        assert start(tmp_path, *half).changes == ("policy.precision: 'float32' -> 'bfloat16'",)
    else:
        with pytest.raises(ConfigError, match=r"policy\.precision = 'bfloat16'\n.*was saved with 'float32'"):
            start(tmp_path, *half)


def test_adapters_stay_with_their_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        model = tmp_path / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
        (model / "tokenizer_config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"")
    lora = ["policy.megatron_cfg.peft.enabled=true", "generation=transformers"]
    save(tmp_path / "run", 10, *lora, "policy.model_name=./one")
    assert start(tmp_path / "run", *lora, f"policy.model_name={tmp_path / 'one'}").steps == 10
    with pytest.raises(ConfigError, match=r"policy\.model_name = './two'\n.*LoRA adapters of './one'"):
        start(tmp_path / "run", *lora, "policy.model_name=./two")
    # Without LoRA a checkpoint has all weights.
    save(tmp_path / "whole", 10, "policy.model_name=./one")
    assert start(tmp_path / "whole", "policy.model_name=./two").steps == 10


def test_a_damaged_checkpoint_is_an_error_also_where_it_is_named(tmp_path):
    saved = save(tmp_path / "other", 30)
    (saved.path / POLICY / "stranger").write_text("")
    for named in (saved.path, tmp_path / "other"):
        with pytest.raises(CheckpointError, match="stranger is not one of its files"):
            start(tmp_path / "run", f"checkpoint.resume_from={named}")
