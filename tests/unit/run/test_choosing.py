"""The choice of engine settings within a mismatch budget."""

import json
from dataclasses import replace

import pytest

from nemo_rl_lite import choose as command
from nemo_rl_lite.errors import RunStopped, WorkerError
from nemo_rl_lite.models.shape import LatentShape, find_shape
from nemo_rl_lite.run import choosing
from nemo_rl_lite.run.choosing import Estimate, Measured, candidates, choose, measure, of_steps
from nemo_rl_lite.validation.compose import compose_config

STEP = {
    "train/gen_kl_error": 2e-3,
    "performance/generation_tokens_per_sec": 100.0,
    "timing/train/generation": 9.0,
    "timing/train/prepare_for_generation/transfer_and_update_weights": 1.0,
}
CORRECTED = (
    "algorithm.loss_fn.use_importance_sampling_correction=true",
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
)
ON_GPU = ("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1")


def measured(name: str, nats: float, rate: float, nats_error: float = 0.0, rate_error: float = 0.0) -> Measured:
    return Measured((name,), Estimate(nats, nats_error), Estimate(rate, rate_error), "")


GIVEN = measured("given", 1e-3, 100, rate_error=3)
FAILED = Measured(("engine=broken",), None, None, "the engine did not start")


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([], "given"),
        ([measured("slower", 1e-4, 90)], "given"),
        ([measured("faster", 4e-3, 110, rate_error=4)], "given"),
        ([measured("faster", 4e-3, 111, rate_error=4)], "faster"),
        ([measured("fastest", 6e-3, 150), measured("faster", 4e-3, 120)], "faster"),
        ([measured("uncertain", 4e-3, 150, nats_error=6e-4)], "given"),
        ([FAILED], "given"),
    ],
)
def test_the_fastest_within_the_budget_replaces_the_given_settings_if_it_is_clearly_faster(others, chosen):
    found = choose([GIVEN, *others], budget=5e-3)
    assert found is not None and found.overrides == (chosen,)


def test_a_name_has_the_last_part_of_each_key():
    own = "++generation.vllm_kwargs.kv_cache_dtype=fp8", "generation.min_p=0.5"
    assert Measured(own, None, None, "").name == "kv_cache_dtype=fp8 min_p=0.5"
    assert Measured((), None, None, "").name == "as given"


def test_settings_above_the_budget_are_replaced_by_slower_ones():
    within = measured("slower", 1e-4, 50)
    assert choose([GIVEN, within], budget=5e-4) is within
    assert choose([GIVEN, FAILED], budget=5e-4) is None


def test_the_rate_counts_refits_and_leaves_out_the_warm_up():
    warm = STEP | {"performance/generation_tokens_per_sec": 1.0, "train/gen_kl_error": 4e-3}
    found = of_steps((), [warm, STEP, STEP])
    assert found.rate == Estimate(pytest.approx(90), 0)
    assert found.mismatch == Estimate(pytest.approx(8e-3 / 3), pytest.approx(2e-3 / 3))


def test_candidates_are_valid_where_they_are_tried():
    on_cpu, on_gpu = (compose_config(list(own)) for own in ((), ON_GPU))
    assert candidates(on_cpu)[0] == candidates(on_gpu)[0] == ()
    for own in candidates(on_cpu):
        compose_config(list(own))
    # The embedded model has no layers of whole blocks.
    fitting = [own for own in candidates(on_gpu) if "fp8_per_block" not in " ".join(own)]
    accepted = [compose_config([*ON_GPU, *own]).generation.vllm_kwargs for own in fitting]
    tried = {name for options in accepted for name in options}
    assert {"quantization", "kv_cache_dtype", "attention_backend"} <= tried


def test_candidates_depend_on_the_model(monkeypatch):
    found = candidates(compose_config([*ON_GPU, "policy.model_name=Qwen/Qwen3-30B-A3B"]))
    assert ("policy.router_replay.enabled=true",) in found and not any("quantization" in str(own) for own in found)
    latent = replace(find_shape("Qwen/Qwen3-8B"), latent=LatentShape(512, 1536, 64, 128))
    monkeypatch.setattr(choosing, "find_shape", lambda name: latent)
    found = str(candidates(compose_config([*ON_GPU, "policy.model_name=Qwen/Qwen3-8B"])))
    assert "quantization" in found and "attention_backend" not in found


def test_a_candidate_that_fails_is_a_row_of_the_table(tmp_path, monkeypatch):
    def run_in(folder, config, command, callbacks):
        raise WorkerError("generation rank 0", "start", "no such kernel")

    monkeypatch.setattr(choosing, "run_in", run_in)
    assert "no such kernel" in measure([], (), 2, tmp_path / "0", "").failure
    refused = measure([], ("++generation.vllm_kwargs.quantization=fp8_per_channel",), 2, tmp_path / "1", "")
    assert refused.failure == "needs GPUs" and not (tmp_path / "1").exists()


def test_a_stop_ends_the_command(tmp_path, monkeypatch):
    def run_in(folder, config, command, callbacks):
        raise RunStopped(1, 4, "SIGTERM", str(folder))

    monkeypatch.setattr(choosing, "run_in", run_in)
    with pytest.raises(RunStopped):
        measure([], (), 2, tmp_path / "0", "")


def test_a_short_run_is_synchronous_and_writes_no_checkpoint(tmp_path, monkeypatch):
    seen = []

    def run_in(folder, config, command, callbacks):
        seen.append(config)
        lines = [{"timing/setup/ray": 1.0}, STEP, STEP, STEP]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(choosing, "run_in", run_in)
    given = ["algorithm.rollouts.source=one_step_off", *CORRECTED]
    given += ["generation.max_gen_kl=1e-3", "logger.tensorboard_enabled=true"]
    assert measure(given, (), 3, tmp_path / "0", "") == Measured((), Estimate(2e-3, 0), Estimate(90, 0), "")
    [config] = seen
    assert config.algorithm.max_num_steps == 3 and config.algorithm.rollouts.source == "on_policy"
    assert config.generation.max_gen_kl is None and not config.logger.tensorboard_enabled
    assert not config.checkpoint.save_period and not config.checkpoint.exports


def test_a_run_that_ends_early_says_nothing_about_speed(tmp_path, monkeypatch):
    def run_in(folder, config, command, callbacks):
        assert config.algorithm.max_num_epochs is None
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [STEP, STEP])))

    monkeypatch.setattr(choosing, "run_in", run_in)
    assert measure([], (), 3, tmp_path / "0", "").failure == "the run had 2 steps, and 3 are needed"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The command in an empty folder, with scripted candidates."""
    monkeypatch.chdir(tmp_path)
    scripted = {(): GIVEN, ("policy.precision=bfloat16",): measured("fast", 4e-3, 200)}
    monkeypatch.setattr(command, "measure", lambda overrides, own, steps, folder, words: scripted.get(own, FAILED))
    return tmp_path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    return int(ended.value.code or 0)


def test_the_command_prints_the_keys_and_keeps_the_figures(here, capsys):
    tried = ["--try", "policy.precision=bfloat16", "--try", "policy.precision=float32 generation.min_p=0"]
    assert call("generation.max_gen_kl=5e-3", "hydra.run.dir=found", *tried) == 0
    said = capsys.readouterr().out
    assert "take     fast" in said and "failed   engine=broken: the engine did not start" in said
    kept = json.loads((here / "found" / command.FILE).read_text())
    assert kept["chosen"] == ["fast"] and [bool(one["failure"]) for one in kept["candidates"]] == [False, False, True]
    assert call("generation.max_gen_kl=5e-3", "hydra.run.dir=found") == 2
    assert "is not empty" in capsys.readouterr().err


def test_no_candidate_within_the_budget_is_its_own_status(here):
    assert call("generation.max_gen_kl=1e-9", "--try", "policy.precision=bfloat16") == command.NONE_WITHIN


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "generation.max_gen_kl=5e-3"),
        (["generation.max_gen_kl=1e-3", "--try", "generation.temprature=1"], "generation.temperature"),
        (["generation.max_gen_kl=1e-3", "--try", "data.path='x"], "No closing quotation"),
        (["generation.max_gen_kl=0"], "generation.max_gen_kl"),
        (["algorithm=sft", "generation.max_gen_kl=1e-3"], "algorithm=grpo"),
        (["generation.max_gen_kl=1e-3", "--steps", "2"], "--steps must be at least 3"),
    ],
)
def test_an_unusable_command_names_its_fix(here, capsys, arguments, named):
    assert call(*arguments) == 2
    assert named in capsys.readouterr().err
