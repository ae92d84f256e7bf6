"""Count the bytes that each policy and engine GPU sends and receives in a refit between them: refit_bytes.py

The transfers are those of a run: each rank's parameters and windows follow from the layouts of Megatron and vLLM, and
`refit.windows.route` divides them.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import record
from torch import empty

from nemo_rl_lite.models.shape import ModelShape, find_shape
from nemo_rl_lite.refit.trace import Segment, StridedView, segments_of_window
from nemo_rl_lite.refit.windows import Piece, Transfer, route

BUCKET, ITEM = 10**9, 2
MOST = 1.05


@dataclass(frozen=True)
class Layout:
    """A run of `policy` GPUs, and of `engines` engines of `engine` GPUs each, which split whole experts."""

    name: str
    model: str
    policy: int
    tp: int
    pp: int
    ep: int
    engines: int
    engine: int

    @property
    def stage(self) -> int:
        return self.policy // self.pp


LAYOUTS = (
    Layout("8B, TP 2 to TP 2", "Qwen/Qwen3-8B", 2, 2, 1, 1, 1, 2),
    Layout("8B, DP 2 to TP 2", "Qwen/Qwen3-8B", 2, 1, 1, 1, 1, 2),
    Layout("8B, DP 2 to two engines", "Qwen/Qwen3-8B", 2, 1, 1, 1, 2, 1),
    Layout("70B, TP 8, DP 4 to four engines of TP 8", "meta-llama/Llama-3.1-70B-Instruct", 32, 8, 1, 1, 4, 8),
    Layout("70B, TP 4, PP 4, DP 2 to four engines of TP 8", "meta-llama/Llama-3.1-70B-Instruct", 32, 4, 4, 1, 4, 8),
    Layout("235B, TP 2, PP 8, EP 8 to eight engines of TP 8", "Qwen/Qwen3-235B-A22B", 64, 2, 8, 8, 8, 8),
)


@dataclass(frozen=True)
class Matrix:
    """A tensor. `cut`: the axis of tensor-parallel shards, None if all ranks have it whole. `heads`: of its first axis,
    which shards do not split. `expert`: its expert."""

    name: str
    shape: tuple[int, ...]
    stage: int
    cut: int | None = None
    heads: int = 0
    expert: int | None = None


def matrices(shape: ModelShape, pp: int) -> Iterator[Matrix]:
    hidden, dim = shape.hidden, shape.head_dim
    yield Matrix("embedding", (shape.vocabulary, hidden), 0, cut=0)
    yield Matrix("head", (shape.vocabulary, hidden), pp - 1, cut=0)
    yield Matrix("norm", (hidden,), pp - 1)
    for layer in range(shape.layers):
        stage = layer * pp // shape.layers
        yield Matrix(f"{layer}.norms", (2, hidden), stage)
        yield Matrix(f"{layer}.q", (shape.heads * dim, hidden), stage, cut=0, heads=shape.heads)
        for name in ("k", "v"):
            yield Matrix(f"{layer}.{name}", (shape.kv_heads * dim, hidden), stage, cut=0, heads=shape.kv_heads)
        yield Matrix(f"{layer}.o", (hidden, shape.heads * dim), stage, cut=1)
        if shape.experts:
            yield Matrix(f"{layer}.router", (shape.experts, hidden), stage)
        for expert in range(shape.experts) or (None,):
            ffn = shape.ffn if expert is None else shape.expert_ffn
            for name, cut, size in (("gate", 0, (ffn, hidden)), ("up", 0, (ffn, hidden)), ("down", 1, (hidden, ffn))):
                yield Matrix(f"{layer}.{expert}.{name}", size, stage, cut=cut, expert=expert)


def share(one: Matrix, cut: int, ranks: int, rank: int) -> StridedView:
    """Return the part of a matrix that a tensor-parallel rank has. More ranks than heads share a head."""
    ranks, rank = (one.heads, rank * one.heads // ranks) if 0 < one.heads < ranks else (ranks, rank)
    size = one.shape[cut] // ranks
    part = empty(one.shape, device="meta").narrow(cut, rank * size, size)
    return StridedView(part.storage_offset(), tuple(part.shape), part.stride())


def segments(one: Matrix, number: int, layout: Layout, experts: int) -> tuple[list[Segment], list[list[int]]]:
    """Return the segments of a matrix in rank 0's recipe, and all ranks that hold each."""
    ranks = range(one.stage * layout.stage, (one.stage + 1) * layout.stage)
    if one.expert is not None:
        own = one.expert * layout.ep // experts
        parts, holders = [whole(one)], [[rank for rank in ranks if rank % layout.ep == own]]
    elif one.cut is None:
        parts, holders = [whole(one)], [[*ranks]]
    else:
        parts = [share(one, one.cut, layout.tp, tp) for tp in range(layout.tp)]
        holders = [[rank for rank in ranks if rank % layout.tp == tp] for tp in range(layout.tp)]
    found = []
    for part, own in zip(parts, holders, strict=True):
        rows = empty(part.sizes, device="meta").stride()
        found.append(Segment(own[0], number, StridedView(0, part.sizes, rows), part))
    return found, holders


def whole(one: Matrix) -> StridedView:
    return StridedView(0, one.shape, empty(one.shape, device="meta").stride())


def transfers(layout: Layout, shape: ModelShape) -> list[Transfer]:
    needs: dict[int, list[Piece]] = defaultdict(list)
    replicas = dict[tuple[int, int], list[int]]()
    for number, one in enumerate(matrices(shape, layout.pp)):
        found, holders = segments(one, number, layout, shape.experts)
        replicas |= {(own[0], number): own for own in holders}
        for rank in range(layout.engine):
            window = whole(one)
            if one.expert is not None:
                if one.expert * layout.engine // shape.experts != rank:
                    continue
            elif one.cut is not None:
                window = share(one, one.cut, layout.engine, rank)
            for segment in segments_of_window(found, prod(one.shape), window) or sys.exit(f"{one} is irregular"):
                needs[rank].append(Piece(segment.rank, segment.parameter, segment.source, "bfloat16", one.name))
    return [one.shifted(layout.engine, layout.engines) for one in route(needs, replicas, BUCKET)]


def measure(layout: Layout) -> tuple[list[dict], list[dict]]:
    """Return the results and the bars of a layout."""
    shape = find_shape(layout.model)
    sent, received, streams = Counter[int](), Counter[int](), defaultdict[str, set[object]](set)
    for one in transfers(layout, shape):
        sent[one.sender] += one.nbytes
        received.update(dict.fromkeys(one.receivers, one.nbytes))
        for rank in (f"policy {one.sender}", *(f"engine {rank}" for rank in one.receivers)):
            streams[rank].add(one.stream)
    weights = sum(prod(one.shape) * ITEM for one in matrices(shape, layout.pp))
    most, least = max(sent.values()), min(sent[rank] for rank in range(layout.policy))
    shares = max(received.values()) / (weights / layout.engine)
    counts = (
        ("weights", "GB", weights / 1e9),
        ("sent by all policy GPUs, share of the weights", "x", sum(sent.values()) / weights),
        ("sent by the policy GPU that sends most", "GB", most / 1e9),
        ("sent by the policy GPU that sends least", "GB", least / 1e9),
        ("received by an engine GPU", "GB", max(received.values()) / 1e9),
        ("received by an engine GPU, times its share of the weights", "x", shares),
        ("process groups of a rank", "count", max(map(len, streams.values()))),
    )
    bars = [record.bar(f"{layout.name}: received, times the share", shares, MOST, at_least=False)]
    return [record.result(name, layout.name, unit, [value]) for name, unit, value in counts], bars


def write(layouts: tuple[Layout, ...]) -> None:
    results, bars = list[dict](), list[dict]()
    for layout in layouts:
        own, met = measure(layout)
        results += own
        bars += met
    sys.stdout.write(record.write("refit-bytes", results, bars, machine=False).read_text())


def main(arguments: list[str]) -> None:
    if arguments:
        sys.exit(__doc__)
    write(LAYOUTS)


def trial() -> None:
    write(LAYOUTS[:2])


if __name__ == "__main__":
    record.start(main, trial)
