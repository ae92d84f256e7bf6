"""Adapters in the memory of vLLM's own layers, whole and as one rank of two."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_lite.config.schema import LoraConfig
from nemo_rl_lite.errors import RefitError
from nemo_rl_lite.generation.vllm import extension
from nemo_rl_lite.generation.vllm.extension import AdapterSlot, RefitExtension, engine_options
from nemo_rl_lite.refit import windows
from nemo_rl_lite.refit.engine import CopyReplayLoader
from nemo_rl_lite.refit.interface import RefitReport
from nemo_rl_lite.refit.layout import CopyList, ReceivedBucket, make_plan, view
from nemo_rl_lite.refit.trace import Segment, StridedView
from nemo_rl_lite.refit.windows import WindowRoutes, route

# The second of two ranks has fewer of the adapters' dimensions than the first.
DIM, MOST, HIDDEN, HEADS, KV_HEADS, HEAD = 6, 8, 16, 4, 2, 8
WIDTHS = {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD, "o_proj": HIDDEN}


def layer_of(kind: str, tp_size: int, tp_rank: int, inputs: int, outputs: list[int], sharded: bool):
    """A layer of vLLM's with zeros for adapters, without the layer that it adapts."""
    # Imported here, because every process of the tests imports this module.
    layers = pytest.importorskip("vllm.lora.layers")
    made = object.__new__(getattr(layers, f"{kind}{'Sharded' if sharded else ''}LoRA"))
    torch.nn.Module.__init__(made)
    made.tp_size, made.tp_rank, made.n_slices = tp_size, tp_rank, len(outputs)
    made.input_size, made.output_size = inputs, outputs[0]
    made.output_slices = tuple(outputs)
    return made


def memory(shapes: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(1, 1, *shape) for shape in shapes)


def qkv(tp_size: int, tp_rank: int):
    own = [width // tp_size for name, width in WIDTHS.items() if name != "o_proj"]
    sharded = tp_size > 1
    made = layer_of("MergedQKVParallelLinearWith", tp_size, tp_rank, HIDDEN, own, sharded)
    made.output_ids = (tp_rank,) * 3
    rank = MOST // tp_size if sharded else MOST
    made.lora_a_stacked = memory([(rank, HIDDEN)] * 3)
    made.lora_b_stacked = memory([(width, MOST) for width in own])
    return made


def row(tp_size: int, tp_rank: int):
    inputs = HEADS * HEAD // tp_size
    sharded = tp_size > 1
    made = layer_of("RowParallelLinearWith", tp_size, tp_rank, inputs, [HIDDEN], sharded)
    made.lora_a_stacked = memory([(MOST, inputs)])
    made.lora_b_stacked = memory([(HIDDEN // tp_size if sharded else HIDDEN, MOST)])
    return made


class Manager(SimpleNamespace):
    """What `AdapterSlot` uses of vLLM's manager."""

    def __init__(self, tp_size: int = 1, tp_rank: int = 0):
        super().__init__(
            modules={"l.qkv_proj": qkv(tp_size, tp_rank), "l.o_proj": row(tp_size, tp_rank)},
            packed_modules={"l.qkv_proj": ["l.q_proj", "l.k_proj", "l.v_proj"]},
            model=torch.nn.Module(),
            events=[],
        )

    def remove_all_adapters(self) -> None:
        self.events.append("cleared")

    def create_dummy_lora(self, number: int, rank: int, embeddings: dict) -> int:
        return number

    def add_adapter(self, adapter: int) -> None:
        self.events.append(adapter)

    def activate_adapter(self, number: int) -> None:
        self.events.append(f"active {number}")


def adapters(dim: int = DIM) -> dict[str, torch.Tensor]:
    source, made = torch.Generator().manual_seed(0), {}
    for name, width in WIDTHS.items():
        inputs = HEADS * HEAD if name == "o_proj" else HIDDEN
        made[f"l.{name}.lora_A.weight"] = torch.randn(dim, inputs, generator=source)
        made[f"l.{name}.lora_B.weight"] = torch.randn(width, dim, generator=source)
    return made


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_they_lie_where_vllm_would_put_them(tp_size, tp_rank):
    manager, theirs, named = Manager(tp_size, tp_rank), Manager(tp_size, tp_rank), adapters()
    slot = AdapterSlot(manager, scaling=1.5)
    slot.take()
    # One by one, as if each came in a bucket of its own.
    filled = [slot.load([item]) for item in named.items()]
    slot.scale()
    assert set().union(*filled) == slot.wanted
    for name, module in theirs.modules.items():
        parts = theirs.packed_modules.get(name, [name])
        firsts = [named[f"{part}.lora_A.weight"] for part in parts]
        seconds = [1.5 * named[f"{part}.lora_B.weight"] for part in parts]
        packed = len(parts) > 1
        module.set_lora(0, firsts if packed else firsts[0], seconds if packed else seconds[0])
        for which in ("lora_a_stacked", "lora_b_stacked"):
            for ours, own in zip(getattr(manager.modules[name], which), getattr(module, which), strict=True):
                assert own.any() and torch.equal(ours, own), (name, which)


def test_a_rank_may_have_none_of_the_adapters_dimensions():
    slot = AdapterSlot(Manager(2, 1), scaling=1)
    named = [("l.q_proj.lora_A.weight", torch.ones(MOST // 2, HIDDEN))]
    assert slot.load(named) == {"l.q_proj.A"} and not any(one.any() for one in slot.memory)


def test_adapters_of_another_pipeline_stage_are_left_to_it(monkeypatch):
    utils = pytest.importorskip("vllm.model_executor.models.utils")
    missing = utils.PPMissingLayer
    # vLLM's cache has the addresses of models. This one may have the address of an earlier test's.
    monkeypatch.setattr(utils, "_model_to_pp_missing_layer_names", {})
    manager, there = Manager(), {"m.q_proj.lora_A.weight": torch.ones(DIM, HIDDEN)}
    manager.model.m = missing()
    slot = AdapterSlot(manager, scaling=1)
    assert slot.load(list(there.items())) == set() and not any(one.any() for one in slot.memory)
    with pytest.raises(RefitError, match=r"no adapter to n\.q_proj"):
        slot.load([("n.q_proj.lora_A.weight", torch.ones(DIM, HIDDEN))])


@pytest.mark.parametrize(("dim", "ranks", "most"), [(1, 1, 1), (1, 2, 8), (9, 1, 16), (512, 4, 512), (300, 1, 320)])
def test_vllm_has_memory_for_the_adapters(dim, ranks, most):
    config = LoraConfig(enabled=True, dim=dim, alpha=2, dropout=0, target_modules=["linear_fc1"])
    options = engine_options(config, ranks)
    assert options["max_lora_rank"] == most and options["fully_sharded_loras"] == (ranks > 1)
    assert options["lora_target_modules"] == ["gate_proj", "up_proj"]


@pytest.mark.parametrize("dim", [DIM, MOST])
@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 0), (2, 1)])
def test_later_refits_are_copies_alone(tp_size, tp_rank, dim):
    """An engine on the policy's GPU needs no buckets, if vLLM has no more dimensions than the adapter."""
    slot, named = AdapterSlot(Manager(tp_size, tp_rank), scaling=0.5), adapters(dim)
    plan = make_plan([(name, tuple(one.shape), "float32") for name, one in named.items()], bucket_bytes=2000)
    assert len(plan.buckets) > 2
    destinations, theirs = CopyReplayLoader(slot.load, slot.memory), AdapterSlot(Manager(tp_size, tp_rank), scaling=0.5)
    for change in (0, 1, 2):
        for index, bucket in enumerate(plan.buckets):
            buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            for one in bucket.slots:
                view(buffer, one).copy_(named[one.name] + change)
            destinations.fill(ReceivedBucket(index, bucket, buffer))
        slot.scale()
        theirs.load([(name, one + change) for name, one in named.items()])
        theirs.scale()
        assert all(map(torch.equal, slot.memory, theirs.memory)) and any(one.any() for one in slot.memory)
    assert (destinations.windows() is not None) == (dim == MOST)
    assert destinations.filled == slot.wanted and not destinations.left


def in_order(tensor: torch.Tensor) -> StridedView:
    return StridedView(0, (tensor.numel(),), (1,))


@pytest.mark.parametrize("factor", [1, 2])
def test_windows_are_compared_with_scaled_adapters(factor, monkeypatch):
    """An engine whose adapters are not zero, as after a resume, has scaled its B. `factor`: of what arrives later."""
    slot, named = AdapterSlot(Manager(), scaling=1.5), adapters(MOST)
    slot.load(list(named.items()))
    parameters = {number: factor * one for number, one in enumerate(named.values())}
    recipe = {
        name: [Segment(0, number, in_order(one), in_order(one))] for number, (name, one) in enumerate(named.items())
    }
    plan = make_plan([(name, tuple(one.shape), "float32") for name, one in named.items()], bucket_bytes=10**6)
    destinations = CopyReplayLoader(slot.load, slot.memory)
    buffer = torch.zeros(plan.nbytes, dtype=torch.uint8)
    CopyList([view(buffer, one) for one in plan.buckets[0].slots], list(named.values())).run()
    destinations.fill(ReceivedBucket(0, plan.buckets[0], buffer))
    slot.scale()
    before = [one.clone() for one in slot.memory]

    class Receiver:
        """What arrives, without a process group."""

        def __init__(self, channel, verify):
            pass

        def receive(self, loader) -> RefitReport:
            for index, one in enumerate(transfers):
                buffer = torch.zeros(one.bucket.nbytes, dtype=torch.uint8)
                sent = [piece.source.of(parameters[piece.parameter]) for piece in one.pieces]
                CopyList([view(buffer, slot) for slot in one.bucket.slots], sent).run()
                loader.fill(ReceivedBucket(index, one.bucket, buffer))
            return RefitReport()

    monkeypatch.setattr(windows, "BucketReceiver", Receiver)
    monkeypatch.setattr(WindowRoutes, "channel", lambda *_: None)
    worker: Any = object.__new__(RefitExtension)
    worker.rank, worker.device = 0, torch.device("cpu")
    worker._destinations, worker._slot, worker._receiver = destinations, slot, None
    pieces = worker.refit_pieces(recipe)
    transfers = route({0: pieces}, {(0, number): [0] for number in parameters}, 2000)
    routes = WindowRoutes(transfers, 0, ("", 0), SimpleNamespace(verify="off"))  # pyrefly: ignore
    assert (worker.refit_join_windows([routes]) is None) == (factor == 1)
    # Nothing is changed before the next refit, which brings all of it.
    assert all(map(torch.equal, slot.memory, before))
    worker._receiver.receive(destinations)
    slot.scale()
    assert all(torch.equal(own, factor * one) for own, one in zip(slot.memory, before, strict=True))


def test_an_engine_frees_its_buckets_before_it_connects_again(monkeypatch):
    monkeypatch.setattr(extension, "adapter_manager", lambda runner: Manager())
    monkeypatch.setattr(extension, "log_to_stderr", lambda: None)
    alive = []

    class Receiver:
        pass

    def connect(source, device) -> Receiver:
        assert not [one for one in alive if one() is not None]
        receiver = Receiver()
        alive.append(weakref.ref(receiver))
        return receiver

    monkeypatch.setattr(extension, "connect", connect)
    worker: Any = object.__new__(RefitExtension)
    worker.rank, worker.device, worker.model_runner = 0, "cpu", None
    for _ in range(2):
        worker.refit_join([None], scaling=2.0)
        alive.append(weakref.ref(worker._destinations))
    assert len(alive) == 4
