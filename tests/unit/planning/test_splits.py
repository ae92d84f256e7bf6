"""Splits of the GPUs between engines and policy: times, refusals, overrides, and the choice."""

import json
import re
from dataclasses import asdict, replace

import pytest

from nemo_rl_lite.config.composition import overlaid
from nemo_rl_lite.models.shape import KNOWN_MODELS, find_shape, model_shape
from nemo_rl_lite.observability.console import ENGINES_IDLE
from nemo_rl_lite.observability.runs import read_state
from nemo_rl_lite.observability.trackers import METRICS_FILE
from nemo_rl_lite.planning.advice import (
    FEWEST_STEPS,
    Advice,
    cascade_attention,
    faster_split,
    measured_phases,
    measured_steps,
)
from nemo_rl_lite.planning.lengths import Lengths, assumed_lengths
from nemo_rl_lite.planning.splits import GpuSplits, lines, rows
from nemo_rl_lite.planning.time import StepTime
from nemo_rl_lite.report.record import read_run
from nemo_rl_lite.run.following import status_rows
from nemo_rl_lite.validation.compose import compose_config, resolve

SHAPE = model_shape(KNOWN_MODELS["Qwen/Qwen3-8B"])
GPUS = ["policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=Qwen/Qwen3-8B", "cluster.gpus_per_node=8"]
GPUS += ["policy.megatron_cfg.activation_checkpointing=true", "policy.sequence_packing.shared_prompts=false"]
# 3,840 sequences can be divided by any number of replicas below 7.
SIZES = ["algorithm.num_prompts_per_step=480", "policy.train_global_batch_size=3840"]
APART = ["generation.colocated.enabled=false", "generation.colocated.resources.gpus_per_node=4"]
OFF = [
    *("algorithm.rollouts.source=one_step_off", "algorithm.loss_fn.use_importance_sampling_correction=true"),
    "algorithm.loss_fn.truncated_importance_sampling_ratio=2",
]
PARTIAL = ["algorithm.rollouts.source=queue", *OFF[1:], "generation.colocated.sleep=true"]
TENSOR = "policy.megatron_cfg.tensor_model_parallel_size"
H200 = 143771 * 2**20


def splits_of(*overrides: str, gib: float = 141) -> GpuSplits:
    """Return the splits for responses of 400 tokens."""
    given = [*GPUS, *overrides]
    config = compose_config(given)
    return GpuSplits(config, SHAPE, int(gib * 2**30), assumed_lengths(config, 400), given)


def said_of(splits: GpuSplits) -> str:
    return "\n".join(lines(splits))


@pytest.mark.parametrize(
    "own",
    [
        [*APART],
        [*APART, *OFF],
        ["offload=pinned"],
        ["policy.offload_for_generation=[gradients]"],
        ["async=partial"],
        ["async=queue", APART[1]],
    ],
)
def test_overrides_give_the_split_that_they_belong_to(own):
    found = splits_of(*SIZES, *own)
    # Of ten, without the present one.
    assert len(found.others) == 10 - (own != APART)
    fitting = [one for one in found.others if one.time]
    assert len(fitting) >= 5
    for split in fitting:
        kept = [override for override in [*GPUS, *SIZES, *own] if override not in split.instead_of]
        config = compose_config([*kept, *split.overrides])
        again = GpuSplits(config, SHAPE, found.gpu_bytes, found.lengths).present
        assert again.kind == split.kind and again.seconds == split.seconds


def test_only_changed_keys_are_overrides():
    five = next(split for split in splits_of(*SIZES, *APART, *OFF).others if split.engine_gpus == 5)
    assert five.overrides == ["generation.colocated.resources.gpus_per_node=5"] and five.instead_of == [APART[1]]


def test_several_machines_are_split_by_machine():
    apart = [one for one in splits_of("cluster.num_nodes=4", SIZES[1], SIZES[0]).others if not one.colocated]
    assert [one.engine_gpus for one in apart] == [8, 16, 24]
    many = said_of(splits_of("cluster.num_nodes=16", f"{TENSOR}=4", gib=20))
    assert re.search(r"refused: 128 shared, partial, 128 shared, async, (\d+ \+ \d+, ){6}\d+ more: ", many)
    assert list(apart[1].overrides[:2]) == [APART[0], "generation.colocated.resources.num_nodes=2"]


def test_a_refused_split_has_its_reason():
    found = splits_of(f"{TENSOR}=4", "policy.train_global_batch_size=512", gib=20)
    assert [row[0] for row in rows(found)] == ["8 shared (now)"]
    said = said_of(found)
    assert "refused: 8 shared, partial, 8 shared, async, 4 + 4: it needs more than 90% of a GPU's memory" in said
    assert "must divide the number of policy ranks (7)" in said and "no other split" in said


def test_engines_with_a_long_tail_generate_for_several_steps_or_get_their_own_gpus():
    """The longest response decides how long engines take, so half of them take hardly longer."""
    longest = ["generation.max_new_tokens=7000", "policy.max_total_sequence_length=8192", "offload=pinned"]
    packs = [f"policy.sequence_packing.{phase}_mb_tokens=8192" for phase in ("train", "logprob")]
    found = splits_of(f"{TENSOR}=2", *longest, *packs)
    assert found.present.colocated and not found.present.is_async
    apart = min((one for one in found.others if one.source != "partial"), key=lambda one: one.seconds)
    assert not apart.colocated and apart.seconds < 0.9 * found.present.seconds
    assert "algorithm.rollouts.source=queue" in apart.overrides
    # Three rollouts fill the engines' batches, and the longest response has three steps.
    partial = next(one for one in found.others if one.source == "partial")
    assert found.present.time.generation / 3 < partial.time.generation < found.present.time.generation / 2
    assert (partial.time.logprob, partial.time.train) == (found.present.time.logprob, found.present.time.train)
    younger = splits_of(
        f"{TENSOR}=2", *longest, *packs, *PARTIAL, "algorithm.rollouts.max_trajectory_age_steps=1"
    ).present
    assert younger.kind == partial.kind and younger.time.generation > 1.2 * partial.time.generation


def test_a_policy_that_takes_the_step_shares_all_gpus():
    batch = ["algorithm.num_prompts_per_step=512", "policy.train_global_batch_size=4096"]
    found = splits_of(*APART, *batch, f"{TENSOR}=4", "generation.max_new_tokens=400")
    assert found.present.time.policy > 5 * found.present.time.generation
    assert found.best.colocated and not found.best.is_async
    assert "generation.colocated.enabled=true" in said_of(found)


def test_stale_rollouts_must_save_more():
    """A few seconds less with stale rollouts are no reason to give up synchronous ones, but they are one to stay."""
    small = model_shape(KNOWN_MODELS["Qwen/Qwen3-0.6B"])
    batch = ["algorithm.num_prompts_per_step=140", "policy.train_global_batch_size=1120"]
    sync = replace(splits_of(*batch, "generation.max_new_tokens=500"), shape=small)
    faster = next(one for one in sync.others if one.colocated and one.overlaps)
    assert 0.85 * sync.present.seconds < faster.seconds < 0.95 * sync.present.seconds
    assert sync.best is sync.present and "or by 15% with stale rollouts" in said_of(sync)
    stale = replace(splits_of(*batch, *OFF, "generation.max_new_tokens=500"), shape=small)
    assert stale.best is stale.present and said_of(stale).endswith("no other split shortens the step by 5%")


def test_one_step_off_one_side_waits():
    found = splits_of(*APART, *OFF, f"{TENSOR}=4")
    time = found.present.time
    assert found.present.idle == {"engines": (time.policy - time.generation) / time.overlapped}
    sync = splits_of(*APART, f"{TENSOR}=4").present
    assert set(sync.idle) == {"engines", "policy"} and sum(sync.idle.values()) == pytest.approx(1, abs=0.05)


def test_replicas_with_few_sequences_wait():
    few = splits_of(
        "algorithm.num_prompts_per_step=1", "policy.train_global_batch_size=8", "generation.max_new_tokens=900"
    )
    idle = 1 - 1 / few.present.slowest
    assert few.present.idle == {"replicas": pytest.approx(idle * few.present.time.policy / few.present.seconds)}
    assert f"replicas wait for {idle:.0%} of training" in said_of(few) and "each of 8 has 1 of 8" in said_of(few)
    many = splits_of("algorithm.num_prompts_per_step=64", "generation.max_new_tokens=900")
    assert not many.present.idle and "replicas wait" not in said_of(many)


def test_shared_gpus_overlap_only_in_free_time():
    time = StepTime(generation=10, logprob=1, train=3, refit=1, free=2)
    assert time.synchronous == 15 and time.contended == 13
    assert replace(time, free=9).contended == 11


def test_one_gpu_can_only_be_shared():
    found = splits_of("cluster.gpus_per_node=1", "generation.colocated.sleep=false", *OFF, gib=80)
    assert [one.kind for one in found.others] == [(1, True, False, False), (1, True, True, False)]
    assert found.present.is_async and found.present.seconds == found.present.time.contended


# --- Measured grids

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
ROW = [
    *("recipes=grpo-llama3.1-8b-1n8g-pp2", f"policy.model_name={LLAMA}", "cluster.gpus_per_node=4"),
    *("algorithm.num_prompts_per_step=32", "policy.train_global_batch_size=256"),
    "policy.sequence_packing.shared_prompts=false",
]
HALVES = [*OFF, APART[0], "generation.colocated.resources.gpus_per_node=2"]
# Seconds per step on four H200s: colocated, and 2 + 2 one step off.
COLOCATED_S, HALVES_S = 68.3, 70.3


@pytest.mark.parametrize(("own", "measured_s"), [([], COLOCATED_S), (HALVES, HALVES_S)])
def test_the_choice_is_near_the_best_of_a_measured_grid(own, measured_s):
    config = compose_config([*ROW, *own])
    found = GpuSplits(config, find_shape(LLAMA), H200, Lengths(126, 795, 3840), [*ROW, *own])
    assert found.present.seconds == pytest.approx(measured_s, rel=0.1)
    measured = [one for one in (found.present, *found.others) if one.name in ("4 shared", "2 + 2")]
    # Partial rollouts are not in the grid.
    best = min((one for one in measured if one.source != "partial"), key=lambda one: one.seconds)
    assert best.kind == (4, True, False, False)
    assert 1.05 * min(COLOCATED_S, HALVES_S) >= COLOCATED_S


def entries(count: int, **own: float) -> list[dict[str, float]]:
    """Return the metrics of steps of the measured row: 2 + 2, one step off."""
    phases = {"total_step_time": 70.3, "generation": 0.0, "policy_and_reference_logprobs": 23.0}
    phases |= {"policy_training": 46.5, **own}
    lengths = {"mean_prompt_length": 126, "mean_gen_tokens_per_sample": 795, "max_gen_tokens_per_sample": 3840}
    entry = {f"timing/train/{name}": seconds for name, seconds in phases.items()} | {ENGINES_IDLE: 37.0}
    return [{"step": step} | entry | {f"train/{name}": one for name, one in lengths.items()} for step in range(count)]


def test_measured_phases_decide():
    """Engines that are idle for half of the step are better shared, and shared ones stay so."""
    config, shape = compose_config([*ROW, *HALVES]), find_shape(LLAMA)
    sentence = faster_split(config, shape, H200, measured_steps(entries(FEWEST_STEPS + 1)))
    assert "a step takes 70 s (median of 3 steps); with 4 shared GPUs and partial rollouts it would take" in sentence
    assert "generation.colocated.enabled=true algorithm.rollouts.source=queue" in sentence
    partial = entries(9, total_step_time=52.0, generation=14.5, policy_and_reference_logprobs=12.5, policy_training=24)
    assert faster_split(compose_config([*ROW, *PARTIAL]), shape, H200, partial) is None
    assert not measured_steps(entries(FEWEST_STEPS))


def test_phases_are_those_that_a_run_measured():
    """Colocated, one H100, Qwen3-1.7B: 12.6 s alternately, of which engines take 5.5, and 9.2 s concurrently."""
    shared = GpuSplits(compose_config(ROW), find_shape(LLAMA), H200, Lengths(126, 795, 3840)).present
    found = measured_phases(shared, 12.6, 5.5, 2.2, 4.5, 0)
    assert (found.generation, found.logprob, found.train) == (5.5, 2.2, 4.5) and found.synchronous == pytest.approx(
        12.6
    )
    both = replace(shared, source="queue")
    again = measured_phases(both, 9.2, 0, 3.3, 5.7, 2)
    assert again.contended == pytest.approx(9.2) and again.policy < 9
    apart = replace(shared, colocated=False, source="one_step_off")
    assert measured_phases(apart, 70, 0, 23, 46, 30).generation == pytest.approx(70 - 30 - 1)


KWARGS = "+generation.vllm_kwargs"


@pytest.mark.parametrize(
    ("prompt", "overrides", "is_told"),
    [
        (4096, [], True),
        (128, [], False),
        (4096, [f"{KWARGS}.kv_cache_dtype=fp8"], False),
        (4096, [f"{KWARGS}.attention_backend=FLASHINFER"], False),
        (4096, [f"{KWARGS}.enable_prefix_caching=false"], False),
        (4096, ["policy.router_replay.enabled=true"], False),
        (4096, [f"{KWARGS}.speculative_config={{method: ngram, num_speculative_tokens: 3}}"], False),
    ],
)
def test_long_prompts_ask_for_cascade_attention(prompt, overrides, is_told):
    # The model has no experts to replay.
    config = resolve(overlaid(compose_config([*ROW, *HALVES]), overrides), matters=lambda _: False)
    sentence = cascade_attention(config, find_shape(LLAMA), H200, long_prompts(prompt))
    assert ("attention_backend=CUSTOM" in sentence) if is_told else sentence is None


def long_prompts(tokens: int) -> list[dict]:
    lengths = {"mean_prompt_length": tokens, "mean_gen_tokens_per_sample": 512, "max_gen_tokens_per_sample": 512}
    return [one | {f"train/{name}": value for name, value in lengths.items()} for one in entries(5)]


@pytest.mark.parametrize(("version", "told"), [("0.26.0", 1), ("0.27.0", 0), ("0.260.1", 0)])
def test_only_a_release_with_cascade_attention_is_told_of_it(version, told, folder):
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"versions": {"vllm": version}}))
    news = [*Advice.of(folder).news(long_prompts(4096))]
    assert sum("cascade attention" in one for one in news) == told


@pytest.fixture
def folder(tmp_path):
    """A run of the measured row, one step off."""
    (tmp_path / "config.json").write_text(json.dumps(asdict(compose_config([*ROW, *HALVES]))))
    gpus = ["NVIDIA H200, 143771 MiB, 570.1"] * 4
    (tmp_path / "environment.json").write_text(json.dumps({"hardware": {"gpus": gpus}}))
    return tmp_path


def test_a_run_is_told_once(folder):
    advice = Advice.of(folder)
    assert [*advice.news(entries(1))] == []
    assert len([*advice.news(entries(9))]) == 1 and [*advice.news(entries(10))] == []


def test_no_advice_without_gpus_or_a_known_model(folder):
    environment = folder / "environment.json"
    config = json.loads((folder / "config.json").read_text())
    config["policy"]["model_name"] = "someone/unknown"
    (folder / "config.json").write_text(json.dumps(config))
    assert Advice.of(folder) is None and Advice.of(folder, SHAPE) is not None
    environment.write_text("{}")
    assert Advice.of(folder, SHAPE) is None


def test_status_and_report_name_the_faster_split(folder):
    (folder / METRICS_FILE).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries(9)))
    told = [text for name, text in status_rows(read_state(folder)) if name == "faster"]
    assert len(told) == 1 and "4 shared GPUs" in told[0]
    assert told[0] in read_run(folder).notes
