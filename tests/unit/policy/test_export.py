"""What a producer sends: by what it has found of megatron-bridge's export, or by the bridge. With a made-up bridge."""

import logging
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.policy import export as producer_module
from nemo_rl_lite.policy import worker as worker_module
from nemo_rl_lite.policy.export import Producer, export_weights, plan_refit
from nemo_rl_lite.policy.worker import MegatronWorker
from nemo_rl_lite.refit.buckets import BucketSender
from nemo_rl_lite.refit.layout import same_bytes, view
from nemo_rl_lite.validation.compose import compose_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(producer_module, "_groups", list)
    yield
    dist.destroy_process_group()


@dataclass(frozen=True)
class Task:
    param_weight: torch.Tensor


class Bridge:
    """Fused projections and a norm; counts its exports."""

    def __init__(self, convert):
        self._convert, self.exports = convert, 0
        buffer = torch.randn(1000)
        self.parameters = [buffer[8:68].view(12, 5), buffer[100:105]]

    def get_conversion_tasks(self, _chunks):
        return [Task(param_weight=parameter) for parameter in self.parameters]

    def export_hf_weights(self, _chunks, cpu, show_progress, conversion_tasks, on_cpu=False):
        assert (cpu or on_cpu) and not show_progress
        self.exports += 1
        fused, norm = (task.param_weight for task in conversion_tasks)
        queries, keys = fused.view(2, 6, 5)[:, :4], fused.view(2, 6, 5)[:, 4:]
        yield "q", queries.reshape(8, 5)
        yield "k", keys.reshape(4, 5)
        yield from self._convert(norm)


class Group:
    """A `RefitGroup` of the producer alone."""

    def __init__(self, plan):
        self._plan, self.fails_at = plan, None
        self.buckets, self.weights = 0, {}

    def announce(self, digest):
        pass

    def start(self, buffer, what):
        if self.buckets == self.fails_at:
            raise RefitError("a consumer is gone")
        bucket = self._plan.buckets[self.buckets]
        self.buckets += 1
        self.weights |= {slot.name: view(buffer.clone(), slot) for slot in bucket.slots}
        return SimpleNamespace(finish=lambda: None)


@dataclass
class Connected:
    """A policy rank after everything that comes before the first refit."""

    bridge: Bridge
    model: SimpleNamespace
    producer: Producer
    group: Group
    sender: BucketSender

    @property
    def export(self) -> str:
        return type(self.producer.export).__name__

    def send(self, fails_at=None):
        self.group.buckets, self.group.weights, self.group.fails_at = 0, {}, fails_at
        return self.sender.send()

    def check(self):
        """That what was sent is what the bridge exports now."""
        sent, exported = self.group.weights, dict(export_weights(self.model))
        assert sent.keys() == exported.keys()
        assert all(same_bytes(sent[name], tensor) for name, tensor in exported.items())


def as_it_is(norm):
    yield "norm", norm
    yield "tied", norm.clone()


def model_of(bridge: Bridge, is_whole: bool = True) -> SimpleNamespace:
    place = SimpleNamespace(is_whole=is_whole)

    def of_bridge() -> list[torch.Tensor]:
        return bridge.parameters

    return SimpleNamespace(
        bridge=bridge, chunks=[], device=CPU, lora=None, place=place, parameters=of_bridge, state=of_bridge
    )


def made(convert, bucket_bytes=300, is_whole=True) -> Connected:
    bridge = Bridge(convert)
    model = model_of(bridge, is_whole)
    config = compose_config([f"refit.bucket_bytes={bucket_bytes}"]).refit
    producer = plan_refit(model, config, shared_device=False, consumers=1)
    group = Group(producer.plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producer_module.refit_group, "join", lambda *arguments: group)
        return Connected(bridge, model, producer, group, producer.join(*producer.open("127.0.0.1"), consumers=1))


@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**6])
def test_after_the_start_the_bridge_is_left_alone(bucket_bytes):
    rank = made(as_it_is, bucket_bytes)
    assert rank.export == "BucketReshard"
    for _ in range(3):
        exports = rank.bridge.exports
        for parameter in rank.bridge.parameters:
            parameter.copy_(torch.randn(parameter.shape))
        rank.send()
        assert rank.bridge.exports == exports
        rank.check()


def doubled(norm):
    yield "norm", norm * 2
    yield "tied", norm


def one_more(norm):
    yield "norm", norm + 1
    yield "tied", norm


def only_values(change):
    """The numbers of elements stay as they are."""

    def convert(norm):
        yield "norm", norm
        yield "tied", norm if norm.dtype == torch.int64 else change(norm)

    return convert


@pytest.mark.parametrize(
    ("convert", "name"),
    [
        (doubled, "norm"),
        (one_more, "norm"),
        (only_values(torch.round), "tied"),
        (only_values(torch.Tensor.bfloat16), "tied"),
    ],
)
def test_what_is_more_than_moved_is_left_to_the_bridge_with_one_warning(convert, name, caplog):
    with caplog.at_level(logging.WARNING):
        rank = made(convert)
        for _ in range(3):
            for parameter in rank.bridge.parameters:
                parameter.copy_(torch.randn(parameter.shape) * 10)
            rank.send()
            rank.check()
    assert rank.export == "Stream"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == f"megatron-bridge exports all weights at each refit: {name} is more than moved elements"


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_a_rank_that_gives_up_a_refit_stays_in_step_with_the_others(sent, monkeypatch):
    rank = made(as_it_is, bucket_bytes=1)
    rank.send()
    buckets = len(rank.producer.plan.buckets)
    assert buckets == 4
    assembly, begun, filled = rank.producer.export, [], []
    begin, fill = assembly.begin, assembly.fill
    monkeypatch.setattr(assembly, "begin", lambda index, report: (begun.append(index), begin(index, report)))
    monkeypatch.setattr(assembly, "fill", lambda index, *rest: (filled.append(index), fill(index, *rest)))
    for _ in range(2):
        with pytest.raises(RefitError, match="a consumer is gone"):
            rank.send(fails_at=sent)
        # All of it was done, once.
        assert begun == filled == list(range(buckets))
        begun.clear(), filled.clear()
    rank.send()
    assert begun == filled == list(range(buckets))
    rank.check()


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("consumers", [0, 1])
def test_what_the_bridge_exports_is_gathered_to_its_end_where_several_ranks_gather(is_whole, consumers):
    """By a rank that gives up a refit, and by one without consumers."""
    ended = []

    def with_an_end(norm):
        yield from doubled(norm)
        ended.append(True)

    if consumers:
        rank = made(with_an_end, bucket_bytes=1, is_whole=is_whole)
        rank.send()
        before = len(ended)
        with pytest.raises(RefitError, match="a consumer is gone"):
            rank.send(fails_at=0)
    else:
        model = model_of(Bridge(with_an_end), is_whole)
        producer = plan_refit(model, compose_config().refit, shared_device=False, consumers=0)
        before = len(ended)
        assert producer.join(*producer.open("127.0.0.1"), consumers=0).send() is None
    assert len(ended) == before + (not is_whole)


def test_a_rank_frees_its_sender_before_it_connects_again(monkeypatch):
    """A sender has process groups, and buckets of windows."""
    monkeypatch.setattr(worker_module, "require_weights", lambda *_: None)
    alive = list[weakref.ref]()

    class Sender:
        def send(self):
            pass

    def join(*_) -> Sender:
        assert not [one for one in alive if one() is not None]
        sender = Sender()
        alive.append(weakref.ref(sender))
        return sender

    worker: Any = object.__new__(MegatronWorker)
    worker._producer = SimpleNamespace(join=join, require_windows=lambda: SimpleNamespace(join=join))
    worker._store = worker._offer = worker._model = worker._phases = None
    for _ in range(2):
        worker.join_refit(1)
        worker.join_windows(None)
    assert len(alive) == 4
