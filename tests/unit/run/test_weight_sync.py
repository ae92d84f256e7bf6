import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_lite.config.schema_algorithm import GRPOConfig
from nemo_rl_lite.errors import EngineError, RefitError, WorkerError
from nemo_rl_lite.generation.interface import Completion, Request, Sampling
from nemo_rl_lite.refit.interface import PROBE_TOLERANCE, PROBE_TOLERANCE_QUANTIZED, RefitReport
from nemo_rl_lite.refit.layout import Bucket, make_plan
from nemo_rl_lite.refit.windows import Transfer
from nemo_rl_lite.rollout.sampler import PromptCooldown, PromptOrder, Sampler
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers import generation as remote_generation
from nemo_rl_lite.workers import weight_sync
from nemo_rl_lite.workers.generation import RemoteGeneration
from nemo_rl_lite.workers.weight_sync import PROBE_TOKENS, ProbeSettings, WeightSync, producers

PROMPT = [5, 6, 7]


def sync_with(engine_logprobs: list[list[float]]) -> WeightSync:
    """A connected refit whose policy gives every token -1 and whose engines give these."""
    sync = object.__new__(WeightSync)
    tokens = len(engine_logprobs[0])
    sync._probe = ProbeSettings(PROMPT, tokens, temperature=1.0, tolerance=1e-3)

    def logprobs(tokens_BT, lengths_B, phase):
        assert lengths_B.tolist() == [len(PROMPT) + tokens] * len(engine_logprobs)
        return torch.full(tokens_BT.shape, -1.0)

    def start_probe(request):
        assert request.prompt == tuple(PROMPT)
        sampling = request.sampling
        assert sampling.top_p == 1 and sampling.top_k is None and sampling.max_new_tokens == tokens
        return dict(enumerate(engine_logprobs))

    def collect_probe(begun):
        answers = (Completion((7,) * tokens, tuple(values), "length", (1,) * tokens) for values in begun.values())
        return dict(zip(begun, answers, strict=True))

    sync._probing = {}
    sync._policy = SimpleNamespace(logprobs=logprobs)
    sync._generation = SimpleNamespace(start_probe=start_probe, collect_probe=collect_probe)
    return sync


def test_a_probe_that_agrees_reports_the_mean_difference_once():
    sync = sync_with([[-1.0, -1.0], [-1.0005, -0.9995], [-1.0, -1.0015]])
    sync._start_probe(sync._generation)
    assert sync.verify_with_probe()["probe_logprob_diff"] == pytest.approx(7.5e-4, rel=1e-3)
    assert sync.verify_with_probe() == {}


def test_a_probe_that_disagrees_names_the_engine():
    sync = sync_with([[-1.0, -1.0], [-1.01, -0.99]])
    sync._start_probe(sync._generation)
    with pytest.raises(RefitError, match=r"generation rank 1 .* differ by 0.0100 nats on average"):
        sync.verify_with_probe()
    # Nor does a policy agree that computes NaN.
    sync._policy = SimpleNamespace(logprobs=lambda tokens, *_, **__: torch.full(tokens.shape, math.nan))
    sync._start_probe(sync._generation)
    with pytest.raises(RefitError, match=r"generation rank 0 .* differ by nan nats"):
        sync.verify_with_probe()


DIED, FAILED = WorkerError("generation rank 1", "generate", "died", lost=True), WorkerError("", "generate", "failed")


def engines(monkeypatch, *logprobs: float | WorkerError) -> RemoteGeneration:
    """An engine for each of the numbers, which gives the second of three tokens this logprob, or raises the error when
    somebody waits for it."""

    def wait(answer):
        if isinstance(answer, WorkerError):
            raise answer
        return [Completion((3, 4, 5), (-1.0, answer, -1.0), "stop", (0, 0, 0))]

    class Group(list):
        def call_one(self, place, methods, phase):
            [(call, (method, asked))] = methods
            assert (call, method) == ("call", "sample_now") and asked.seed == 1 + place
            return self[place]

    monkeypatch.setattr(remote_generation, "wait", wait)
    return RemoteGeneration(Group(logprobs), shares_device=False)  # pyrefly: ignore


def sampled(generation: RemoteGeneration, request: Request) -> dict[int, Completion]:
    return generation.collect_probe(generation.start_probe(request))


def test_an_engine_that_died_gives_no_probe_and_one_that_fails_ends_the_run(monkeypatch):
    request = Request((1,), Sampling(1.0, 1.0, None, 3, (), ()), seed=1)
    # Nothing is waited for until somebody asks for the samples.
    failing = engines(monkeypatch, -1.0, FAILED)
    begun = failing.start_probe(request)
    with pytest.raises(WorkerError, match="failed"):
        failing.collect_probe(begun)
    assert [*sampled(engines(monkeypatch, -1.0, DIED, -2.0), request)] == [0, 2]


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_an_engine_that_computes_no_numbers_is_named_with_its_step(monkeypatch, logprob):
    generation, sampling = engines(monkeypatch, -1.0, logprob), Sampling(1.0, 1.0, None, 3, (), ())
    request = Request((1,), sampling, seed=1)
    with pytest.raises(EngineError, match=rf"generation rank 1 sampled token 4 \(position 2 .* logprob {logprob}"):
        sampled(generation, request)
    assert len(sampled(engines(monkeypatch, -1.0, -2.0), request)) == 2
    generation = engines(monkeypatch, -1.0, logprob)
    collect = SimpleNamespace(collect=lambda *_: sampled(generation, request))
    config = compose_config().options(GRPOConfig)
    order = PromptOrder(None, PromptCooldown(0, 0), {"position": 0})  # pyrefly: ignore
    source = Sampler(config, collect, sampling, [], order)  # pyrefly: ignore
    for sample in (lambda: source.rollout(7), lambda: source.held_out(7)):
        with pytest.raises(EngineError, match=r"^step 7: generation rank 1 "):
            sample()


def test_the_probe_is_no_longer_than_a_response():
    config = compose_config(["generation.max_new_tokens=6"])
    assert ProbeSettings.of(config, PROMPT) == ProbeSettings(PROMPT, 6, config.generation.temperature, 1e-3)
    longer = compose_config(["policy.max_total_sequence_length=64", "generation.max_new_tokens=40"])
    assert ProbeSettings.of(longer, PROMPT).tokens == PROBE_TOKENS


def test_probes_of_eight_bit_arithmetic_may_differ_more():
    gpu = ["policy=megatron_gpu", "generation=vllm_gpu", "cluster.gpus_per_node=1"]
    of = {
        key: ProbeSettings.of(compose_config([*gpu, key]), PROMPT).tolerance
        for key in (
            "policy.megatron_cfg.fp8_cfg.enabled=false",
            "policy.megatron_cfg.fp8_cfg.enabled=true",
            "++generation.vllm_kwargs.quantization=fp8_per_channel",
            "++generation.vllm_kwargs.kv_cache_dtype=fp8_e4m3",
        )
    }
    assert [*of.values()] == [PROBE_TOLERANCE["bfloat16"], *[PROBE_TOLERANCE_QUANTIZED] * 3]


def test_consumers_get_their_weights_on_their_own_device_or_from_rank_0():
    # Four policy ranks; two engines of two GPUs each share them, or have others.
    assert producers(4, 4, shared_device=True) == [0, 1, 2, 3]
    assert producers(4, 4, shared_device=False) == [0, 0, 0, 0]
    # On a CPU the numbers need not match.
    assert producers(1, 3, shared_device=True) == [0, 0, 0]
    assert producers(2, 3, shared_device=True) == [0, 1, 0]


class Apart:
    """A policy of two ranks and engines 0 and 2 of three apart, without processes."""

    ranks, live = 2, [0, 2]

    def __init__(self, needed, differing=None, recipe=True):
        self.needed, self.differing, self.recipe = needed, differing, recipe
        self.routed = []

    def refit_recipe(self):
        return {} if self.recipe else None

    def needed_pieces(self, recipe):
        return [self.needed]

    def route_windows(self, needs):
        assert needs == {0: self.needed}
        bucket = Bucket((), 0)
        return [Transfer(1, (0,), bucket, ())]

    def join_windows(self, routes):
        self.routed.append(routes)
        return [RefitReport(), None] if len(self.routed) == 1 else [[None], [self.differing]]


def starting(monkeypatch, both: Apart) -> WeightSync:
    monkeypatch.setattr(weight_sync, "wait", lambda *calls, timeout_s: [one for call in calls for one in call])
    sync: Any = object.__new__(WeightSync)
    sync._policy = sync._generation = both
    sync._ranks_per_engine, sync._address, sync._config, sync._limit_s = 1, ("127.0.0.1", 1), None, 1
    sync._has_windows, sync._transfers, sync._connected = True, [], both.live
    return sync


class Refitted:
    """A policy of one rank and two engines, whose ranks receive these bytes in a refit."""

    ranks, live = 1, [0, 1]

    def __init__(self, *received: int):
        self.received = received

    def only(self, live):
        return self

    def send_weights(self):
        return [RefitReport()]

    def receive_weights(self, version):
        return [[RefitReport(nbytes=nbytes)] for nbytes in self.received]

    def __getattr__(self, name):
        return lambda *_: None


def test_the_bytes_of_a_refit_are_those_of_the_engine_rank_that_received_most(monkeypatch):
    monkeypatch.setattr(weight_sync, "wait", lambda *calls: [one for call in calls for one in call])
    sync: Any = object.__new__(WeightSync)
    sync._policy = sync._generation = Refitted(300, 500)
    sync._config, sync._connected, sync._transfers, sync._has_windows = SimpleNamespace(verify="off"), [0, 1], [], False
    sync._engine_bytes, sync._ranks_per_engine, sync._producers = 0, 1, [0, 0]
    sync._plan = make_plan([("weights", (1000,), "uint8")], 1000)
    metrics = sync.refit(1)
    assert metrics["bytes"] == 500 and metrics["buckets"] == 1
    assert metrics["gb_per_s"] == pytest.approx(500 / metrics["seconds"] / 1e9)


def test_windows_go_from_each_policy_rank_to_every_engine_that_lives(monkeypatch):
    both = Apart(["a piece"])
    sync = starting(monkeypatch, both)
    assert sync._start_windows(sync._generation) == [RefitReport(), None]
    (first, second), of_engines = both.routed
    assert (first.transfers, first.receiver) == ([], None)
    assert [one.receivers for one in second.transfers] == [(0, 1)]
    assert [[one.receiver for one in engine] for engine in of_engines] == [[0], [1]]
    assert sync._transfers == second.transfers and sync._has_windows


@pytest.mark.parametrize(
    ("both", "stays_connected"),
    [(Apart(None), True), (Apart(["a piece"], recipe=False), True), (Apart(["a piece"], differing="norm"), False)],
    ids=["a loader that computes", "an export that computes", "other bytes"],
)
def test_refits_go_on_through_rank_0_where_windows_are_not_enough(monkeypatch, both, stays_connected):
    sync = starting(monkeypatch, both)
    assert sync._start_windows(sync._generation) is None
    assert bool(sync._connected) == stays_connected and not sync._transfers and not sync._has_windows
