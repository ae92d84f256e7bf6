"""What engines have decoded, from their workers to the rates of a step."""

from types import SimpleNamespace

import pytest

from nemo_rl_lite.generation.interface import CacheUse, Decoded, Drafts
from nemo_rl_lite.models.embedded import MODEL_CONFIG
from nemo_rl_lite.models.shape import model_shape
from nemo_rl_lite.planning.memory import DecodingBytes
from nemo_rl_lite.run import model
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers import generation as remote_generation
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.recovery import EngineRules, RecoveringGeneration

SHAPE = model_shape(MODEL_CONFIG)
ON_GPU = [
    *("policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1"),
    *("policy.max_total_sequence_length=128", "generation.max_new_tokens=64"),
]


class Group:
    """Two engines, each of which has decoded `own` since it was asked last."""

    def __init__(self):
        self.own = Decoded()

    def __len__(self):
        return 2

    def part(self, places):
        assert places == [0, 1]
        return self

    def call(self, method, *arguments, phase=""):
        asked = arguments[0] if method == "call" else method
        return {"memory": [{}, {}], "take_decoded": [self.own, self.own], "sleep": [None, None]}[asked]


@pytest.fixture
def generation(monkeypatch):
    monkeypatch.setattr(remote_generation, "wait", lambda *calls: [answer for call in calls for answer in call])
    remote = RemoteGeneration(Group(), shares_device=True)  # pyrefly: ignore
    mismatch, make_queue = SimpleNamespace(settings=None), lambda *_: SimpleNamespace(busy_s=0.0)
    own = remote, None, print, mismatch, None, make_queue, True, print
    found = RecoveringGeneration(*own, EngineRules(2, at_once=False), {})  # pyrefly: ignore
    found.group = remote.group
    return found


def finish(generation, decoded: Decoded, busy_s: float) -> None:
    generation.group.own, generation.queue.busy_s = decoded, busy_s
    generation.finish_generation()


def test_work_and_seconds_are_those_between_the_ends_of_generation(generation):
    finish(generation, Decoded(10, 100), 2.0)
    finish(generation, Decoded(1, 5), 2.5)
    # What has begun since then belongs to the next step.
    generation.queue.busy_s = 9.0
    assert generation.take_decoded() == (Decoded(22, 210), 2.5)
    finish(generation, Decoded(3, 0), 10.0)
    assert generation.take_decoded() == (Decoded(6, 0), 7.5)
    assert generation.take_decoded() == (Decoded(0, 0), 0.0)


@pytest.mark.parametrize(
    ("overrides", "name", "bandwidth"),
    [
        ([], "NVIDIA H100 80GB HBM3", None),
        (ON_GPU, "NVIDIA H100 80GB HBM3", 3.35e12),
        (ON_GPU, "NVIDIA H100 PCIe", None),
    ],
    ids=["CPUs", "a known GPU", "another GPU"],
)
def test_a_step_has_the_rates_of_its_engines(generation, monkeypatch, overrides, name, bandwidth):
    monkeypatch.setattr(model, "gpu_name", lambda: name)
    config = compose_config(overrides)
    take, nbytes = model.decoding_speed(config, SHAPE, generation.take_decoded), DecodingBytes.of(config, SHAPE)
    finish(generation, Decoded(10, 100, seconds=0.75), 2.0)
    rate = (20 * nbytes.step + 200 * nbytes.token) / 2.0
    # Two engines had requests for 2 s together, and worked for 1.5 s.
    expected = {"generation_read_gb_per_sec_per_gpu": rate / 1e9, "engines_starved_share": 0.25}
    expected |= {} if bandwidth is None else {"generation_bandwidth_share": rate / bandwidth}
    assert take() == pytest.approx(expected) and take() == {}
    peak = model.policy_speed(config).peak
    assert peak == (None if bandwidth is None else 989e12)


def test_drafts_are_told_of_a_model_of_unknown_shape_too(generation):
    take = model.decoding_speed(compose_config([]), None, generation.take_decoded)
    finish(generation, Decoded(10, 100, Drafts(2, 6, 3), seconds=1.0), 2.0)
    drafts = {"speculation_acceptance": 0.5, "speculation_accepted_length": 1.5}
    assert take() == drafts | {"engines_starved_share": 0.0} and take() == {}


def test_the_use_of_the_caches_is_that_of_all_forward_passes(generation):
    take = model.decoding_speed(compose_config([]), None, generation.take_decoded)
    finish(generation, Decoded(2, 100, cache=CacheUse(0.75, 0.5, 3), seconds=1.0), 2.0)
    finish(generation, Decoded(1, 100, cache=CacheUse(0.9, 0.9, 0), seconds=0.25), 2.5)
    # Two engines, each with passes at 0.25, 0.5 and 0.9.
    used = {"kv_cache_usage": 0.55, "kv_cache_usage_max": 0.9, "preemptions": 6.0}
    assert take() == pytest.approx(used | {"engines_starved_share": 0.0})
