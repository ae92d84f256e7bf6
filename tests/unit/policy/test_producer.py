"""What a producer sends: by what it has found of megatron-bridge's export, or by the bridge. With a made-up bridge."""

import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.policy.megatron import producer as producer_module
from nemo_rl_lite.policy.megatron.export_recipe import find_export
from nemo_rl_lite.policy.megatron.producer import Producer
from nemo_rl_lite.refit import lending as lending_module
from nemo_rl_lite.refit.packing import same_bytes, view
from nemo_rl_lite.refit.report import RefitReport
from nemo_rl_lite.rules.compose import compose_config


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

    def export_hf_weights(self, _chunks, cpu, show_progress, conversion_tasks):
        assert cpu and not show_progress
        self.exports += 1
        fused, norm = (task.param_weight for task in conversion_tasks)
        queries, keys = fused.view(2, 6, 5)[:, :4], fused.view(2, 6, 5)[:, 4:]
        yield "q", queries.reshape(8, 5)
        yield "k", keys.reshape(4, 5)
        yield from self._convert(norm)


class Sender:
    """To nobody: fills one buffer after the other."""

    def __init__(self, plan):
        self._plan, self.exports = plan, []
        self._buffers = [torch.zeros(bucket.nbytes, dtype=torch.uint8) for bucket in plan.buckets]

    def buffer(self, index):
        return self._buffers[index]

    def send(self, export):
        self.exports.append(type(export).__name__)
        report = RefitReport()
        for index in range(len(self._plan.buckets)):
            export.begin(index, report)
            export.fill(index, self.buffer(index), report)
        return report

    def named(self):
        slots = [(index, slot) for index, bucket in enumerate(self._plan.buckets) for slot in bucket.slots]
        return {slot.name: view(self.buffer(index), slot) for index, slot in slots}


def as_it_is(norm):
    yield "norm", norm
    yield "tied", norm.clone()


def made(convert, bucket_bytes=300) -> tuple[Bridge, Producer, Sender]:
    """After everything that comes before the first refit."""
    bridge = Bridge(convert)
    model = SimpleNamespace(
        bridge=bridge,
        chunks=[],
        device=torch.device("cpu"),
        lora=None,
        place=SimpleNamespace(is_whole=True),
        parameters=lambda: bridge.parameters,
    )
    producer = Producer(model)
    config = compose_config([f"refit.bucket_bytes={bucket_bytes}"]).refit
    sender = Sender(producer.plan(config))
    producer.open("127.0.0.1", shared_device=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producer_module.refit_group, "join", lambda *arguments: None)
        patch.setattr(producer_module, "BroadcastSender", lambda *arguments: sender)
        producer.join(consumers=1)
    return bridge, producer, sender


@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**6])
def test_after_the_first_refit_the_bridge_is_left_alone(bucket_bytes):
    bridge, producer, sender = made(as_it_is, bucket_bytes)
    producer.send()
    exports = bridge.exports
    for _ in range(2):
        for parameter in bridge.parameters:
            parameter.copy_(torch.randn(parameter.shape))
        producer.send()
        assert bridge.exports == exports
        assert all(same_bytes(sender.named()[name], tensor) for name, tensor in dict(producer.export()).items())
        exports = bridge.exports
    assert sender.exports == ["Assembly"] * 3


def doubled(norm):
    yield "norm", norm * 2
    yield "tied", norm


def one_more(norm):
    yield "norm", norm + 1
    yield "tied", norm


def rounded(norm):
    """Numbers of elements stay as they are."""
    yield "norm", norm
    yield "tied", norm if norm.dtype == torch.int64 else norm.round()


def cast(norm):
    yield "norm", norm
    yield "tied", norm if norm.dtype == torch.int64 else norm.bfloat16()


@pytest.mark.parametrize(
    ("convert", "name"), [(doubled, "norm"), (one_more, "norm"), (rounded, "tied"), (cast, "tied")]
)
def test_what_is_more_than_moved_is_left_to_the_bridge_with_one_warning(convert, name, caplog):
    with caplog.at_level(logging.WARNING):
        bridge, producer, sender = made(convert)
        for _ in range(3):
            for parameter in bridge.parameters:
                parameter.copy_(torch.randn(parameter.shape) * 10)
            producer.send()
            exported = dict(producer.export())
            assert all(same_bytes(sender.named()[one], tensor) for one, tensor in exported.items())
    assert sender.exports == ["Stream"] * 3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == f"megatron-bridge exports all weights at each refit: {name} is more than moved elements"


def test_what_is_no_parameter_or_not_contiguous_is_left_to_the_bridge():
    bridge, producer, _ = made(as_it_is)
    plan = producer._plan
    assert find_export(producer._model, plan).unlike is None
    bridge.parameters[1] = torch.randn(10)[::2]
    assert find_export(producer._model, plan).unlike == "norm"
    bridge.parameters[1] = torch.randn(5)
    producer._model.parameters = lambda: bridge.parameters[:1]
    assert find_export(producer._model, plan).unlike == "norm"


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_rank_that_gives_up_a_refit_stays_in_step_with_the_others(begun):
    _, producer, sender = made(as_it_is, bucket_bytes=1)
    producer.send()
    assert len(producer._plan.buckets) == 4

    def fail(export):
        for index in range(begun):
            export.begin(index, RefitReport())
            if index < begun - 1:
                export.fill(index, sender.buffer(index), RefitReport())
        raise RefitError("a consumer is gone")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RefitError, match="a consumer is gone"):
        patch.setattr(sender, "send", fail)
        producer.send()
    # All of it was done, once.
    assert producer.assembly.refits == 2 and producer.assembly._at == 0
    producer.send()
    assert producer.assembly.refits == 3


def test_an_export_by_the_bridge_that_is_given_up_is_gathered_to_its_end():
    ended = []

    def with_an_end(norm):
        yield from doubled(norm)
        ended.append(True)

    _, producer, sender = made(with_an_end, bucket_bytes=1)
    producer.send()
    before = len(ended)

    def fail(export):
        export.begin(0, RefitReport())
        raise RefitError("a consumer is gone")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RefitError, match="a consumer is gone"):
        patch.setattr(sender, "send", fail)
        producer.send()
    assert len(ended) == before + 1


def test_a_new_connection_keeps_no_memory_of_the_one_before():
    _, producer, sender = made(as_it_is)
    producer.send()
    memory = [StorageWeakRef(buffer.untyped_storage()) for buffer in sender._buffers]
    sender._buffers.clear()
    # The assembly has views of it for the next refit.
    assert not any(one.expired() for one in memory)
    producer.open("127.0.0.1", shared_device=False)
    assert all(one.expired() for one in memory)


def test_a_rank_that_nobody_asks_has_nothing_to_do():
    bridge, producer, _ = made(as_it_is)
    producer.plan(compose_config().refit)
    producer.sender = None
    producer.open("127.0.0.1", shared_device=False)
    producer.join(consumers=0)
    assert producer.send() is None
    exports = bridge.exports
    assert producer.send() is None and producer.assembly is None and bridge.exports == exports


class Lent:
    """In place of `Lending`, on a rank that has all parameters though its model is said to be spread."""

    on_one, opens = True, True
    checked = 0

    def __init__(self, parameters, rank, ranks, group):
        assert (rank, ranks, group) == (0, [0], None)
        self.parameters = parameters

    def on_one_machine(self):
        return self.on_one

    def can_be_opened(self):
        return self.opens

    @contextmanager
    def together(self):
        type(self).checked += 1
        # As another process's are seen.
        yield {(0, number): tensor.view(-1).view(torch.uint8) for number, tensor in self.parameters.items()}


def is_whole(producer, lent):
    producer._checked = True


def is_spread(producer, lent):
    producer._checked = False


def is_found_wrong(producer, lent):
    producer._checked = False
    (box,) = producer._found.recipe["k"]
    producer._found.recipe["k"] = [replace(box, piece=replace(box.piece, begin=0))]


def cannot_be_opened(producer, lent):
    lent.opens = False


def is_on_several_machines(producer, lent):
    lent.on_one = False


def is_told_not_to(producer, lent):
    producer._config = compose_config(["refit.direct=false"]).refit


def is_exported_by_the_bridge(producer, lent):
    producer._found = None


LENDING = [is_whole, is_spread]
NOT_LENDING = [is_found_wrong, cannot_be_opened, is_on_several_machines, is_told_not_to, is_exported_by_the_bridge]


@pytest.mark.parametrize("state", [*LENDING, *NOT_LENDING])
def test_engines_on_the_gpus_of_a_policy_copy_its_parameters(state, monkeypatch):
    bridge, producer, _ = made(as_it_is)
    lent = type("OneLent", (Lent,), {})
    monkeypatch.setattr(lending_module, "Lending", lent)
    monkeypatch.setattr(producer_module.ipc, "new_staging", lambda plan, device: ("memory", "a buffer"))
    monkeypatch.setattr(producer_module.ipc, "forget", lambda handle: None)
    monkeypatch.setattr(producer_module.refit_group, "join", lambda *arguments: SimpleNamespace(meet=lambda what: None))
    monkeypatch.setattr(producer_module, "assemble", lambda *arguments: None)
    producer._model.device = torch.device("cuda")
    state(producer, lent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bridge,
            "export_hf_weights",
            lambda chunks, cpu, **rest: Bridge.export_hf_weights(bridge, chunks, cpu=True, **rest),
        )
        # A new connection asks for nothing again.
        for _ in range(2):
            _, shared = producer.open("127.0.0.1", shared_device=True)
            producer.join(consumers=1)
    assert lent.checked == (state in (is_spread, is_found_wrong))
    if state in NOT_LENDING:
        assert shared == "a buffer" and isinstance(producer.sender, producer_module.ipc.IpcSender)
        return
    assert set(shared.recipe) == {"q", "k", "norm", "tied"}
    assert isinstance(producer.sender, producer_module.DirectSender)
    monkeypatch.setattr(producer.sender, "lend", lambda: "lent")
    assert producer.send() == "lent"


def test_engines_on_other_gpus_are_lent_nothing(monkeypatch):
    monkeypatch.setattr(producer_module, "find_lending", None)
    _, producer, _ = made(as_it_is)
    producer._model.device = torch.device("cuda")
    assert producer.open("127.0.0.1", shared_device=False)[1] is None
    with pytest.raises(TypeError):
        producer.open("127.0.0.1", shared_device=True)
