"""Bytes on disk: predictions against what runs wrote, and disks that are too small."""

import pytest

from nemo_rl_lite import plan
from nemo_rl_lite.models.shape import find_shape
from nemo_rl_lite.planning import disk
from nemo_rl_lite.planning.disk import DiskUse, little_space, too_little_space
from nemo_rl_lite.run import command
from nemo_rl_lite.validation.compose import compose_config

SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MEASURED = {
    # The embedded model, and 134.5 M parameters, both in float32 with Adam: bytes of `policy/` and of `hf/`.
    "embedded:reverse-digits": (12_998_549, 3_200_000),
    SMALL: (2_152_000_000, 538_000_000),
}


@pytest.mark.parametrize("model", MEASURED)
def test_predictions_are_what_runs_wrote(model):
    use = DiskUse.of(compose_config([f"policy.model_name={model}", "policy.precision=float32"]), find_shape(model))
    assert (use.checkpoint, use.model) == pytest.approx(MEASURED[model], rel=0.03)


def test_adapters_and_moments_that_are_not_kept_take_no_space():
    shape = find_shape(SMALL)

    def one(*overrides: str) -> int:
        return DiskUse.of(compose_config([f"policy.model_name={SMALL}", *overrides]), shape).checkpoint

    whole = one()
    assert one("policy.megatron_cfg.peft.enabled=true") < whole / 10
    optimizer = "policy.megatron_cfg.optimizer"
    assert one(f"{optimizer}.optimizer=sgd", f"{optimizer}.use_distributed_optimizer=false") <= whole / 2
    assert one("policy.precision=bfloat16") == whole * 14 // 16
    assert one("algorithm.ref_model_sync_steps=5") == whole * 20 // 16
    assert one("algorithm.ref_model_sync_steps=5", "algorithm.loss_fn.reference_policy_kl_penalty=0") == whole


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], 3),
        (["algorithm.max_num_steps=15"], 2),
        (["checkpoint.keep_best=0"], 2),
        (["checkpoint.save_period=0"], 0),
    ],
)
def test_checkpoints_that_are_kept(overrides, kept):
    use = DiskUse.of(compose_config(overrides), find_shape("embedded:reverse-digits"))
    assert use.kept == kept and use.total == (kept + (kept > 1)) * use.checkpoint + use.model


@pytest.mark.parametrize(
    ("free", "refused", "noted"), [(2**20, True, True), (2**24, False, True), (2**30, False, False)]
)
def test_the_free_space_is_checked(tmp_path, monkeypatch, free, refused, noted):
    monkeypatch.setattr(disk, "free_bytes", lambda _: free)
    config = compose_config([])
    assert [bool(list(too_little_space(config, tmp_path))), bool(list(little_space(config, tmp_path)))] == [
        refused,
        noted,
    ]
    # Checkpoints that are there already take nothing more.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "shard").write_bytes(bytes(2**22 * 12))
    assert bool(list(little_space(config, tmp_path))) == (free == 2**20)


def test_a_run_without_room_for_a_checkpoint_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(disk, "free_bytes", lambda _: 2**20)
    with pytest.raises(SystemExit) as end:
        command.launch(["--dry-run", f"hydra.run.dir={tmp_path / 'run'}"])
    assert end.value.code == 2 and "a checkpoint takes 12 MiB" in capsys.readouterr().err


def test_the_plan_has_it(capsys):
    with pytest.raises(SystemExit):
        plan.main([])
    assert "disk: a checkpoint takes 12 MiB, 3 are kept; hf/ takes 3 MiB" in capsys.readouterr().out
