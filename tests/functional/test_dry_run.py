"""A run up to its first process."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_rl_lite.checkpoint.resume import checkpoint_store
from nemo_rl_lite.observability.summary import SUMMARY_FILE
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.run import command
from nemo_rl_lite.run.folder import write_start
from nemo_rl_lite.validation.compose import compose_config

pytestmark = pytest.mark.functional


def save_checkpoint(folder: Path, step: int, *overrides: str) -> None:
    """One that says of which configuration it is, without a policy."""
    config = compose_config(overrides)
    store = checkpoint_store(config, folder)
    store.begin(step)
    store.finish(step, {}, {"config": dataclasses.asdict(config)})


def test_a_dry_run_reads_data_and_writes_nothing(capsys, tmp_path, monkeypatch, model_folder):
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"prompt": f"{n}", "answer": f"{n}"}) + "\n" for n in range(200))
    (tmp_path / "rows.jsonl").write_text(rows)
    data = [
        "data=file",
        "data.train_path=rows.jsonl",
        "data.validation_path=rows.jsonl",
        f"policy.model_name={model_folder}",
        "policy.max_total_sequence_length=32",
    ]
    assert command.launch(["--dry-run", "algorithm.max_num_steps=3", *data]) == []
    text = capsys.readouterr().out
    assert "algorithm.max_num_steps" in text and "dry run: nothing was started" in text
    assert not (tmp_path / "outputs" / "grpo-file").exists()
    save_checkpoint(tmp_path / "earlier", 2, *data)
    command.launch(["--dry-run", "algorithm.max_num_steps=3", "hydra.run.dir=earlier", *data])
    text = capsys.readouterr().out
    assert "resuming after step 2, from " in text and "changed since then  algorithm.max_num_steps: 30 -> 3" in text
    command.launch(["--dry-run", "algorithm.max_num_steps=3", "++hydra.run.dir='earlier'", *data])
    assert "resuming after step 2, from " in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_text("{not json}\n")
    with pytest.raises(SystemExit) as end:
        command.launch(["--dry-run", *data])
    assert end.value.code == 2 and "rows.jsonl" in capsys.readouterr().err


def test_a_dry_run_refuses_the_folder_that_the_run_would_refuse(capsys, tmp_path, monkeypatch, model_folder):
    monkeypatch.chdir(tmp_path)
    begun = tmp_path / "begun"
    begun.mkdir()
    write_start(begun, dataclasses.asdict(compose_config()), "the command")
    (begun / METRICS_FILE).write_text('{"step": 1}\n')
    refused(capsys, "without a checkpoint", "hydra.run.dir=begun", "algorithm.seed=7")
    (begun / SUMMARY_FILE).write_text("{}")
    before = sorted(begun.iterdir())
    refused(capsys, "it is done", "hydra.run.dir=begun")
    assert sorted(begun.iterdir()) == before
    # The jobs of a sweep do not run there.
    refused(capsys, "hydra.sweep.dir=begun", "-m", "algorithm.seed=1,2", "hydra.run.dir=begun")


def test_a_run_that_is_too_large_for_this_machine_is_told_which_batch_to_make_smaller(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**30, available=2**30))
    refused(
        capsys, "a smaller policy.train_micro_batch_size (now 128) or policy.max_total_sequence_length (now 32), fewer"
    )


def refused(capsys, why: str, *overrides: str) -> None:
    with pytest.raises(SystemExit) as end:
        command.launch(["--dry-run", *overrides])
    assert end.value.code == 2 and why in capsys.readouterr().err
