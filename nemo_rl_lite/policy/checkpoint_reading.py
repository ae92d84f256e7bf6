"""Read a distributed checkpoint: each part once, verified, and without running code from it.

One of the ranks that need a part owns it. The owner reads the part, compares its digest, and sends the others the
pieces that they need. So ranks of any layout together read each part once. Threads of a rank read ahead.
"""

import io
import mmap
import os
import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future as Result
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from nemo_rl_lite.checkpoint.store import Part, has_changed, has_digest, load
from nemo_rl_lite.compat.megatron import PartReader, files_read_by
from nemo_rl_lite.compat.torch import tensor_within
from nemo_rl_lite.errors import CheckpointError
from nemo_rl_lite.policy.optimizer import rank_threads
from nemo_rl_lite.refit.group import all_gather

# torch.distributed.checkpoint's index.
INDEX_FILE = ".metadata"
# Overrides torch.distributed.checkpoint's weights_only=False.
_TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# The names that an index may contain, in addition to torch's constants.
_METADATA = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
# From torch 2.13 on, also of the ranks' plans.
_PLAN = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
    *(("torch.distributed.checkpoint.planner", name) for name in _PLAN),
}
# Bytes that a rank reads before it sends their pieces.
_ROUND = 2**26
# Bytes that a rank's threads read ahead, and the most threads.
_AHEAD, _THREADS = 2**30, 8
# Errors from reading a damaged file.
_OF_DAMAGED_FILES = (
    OSError,
    RuntimeError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    pickle.PickleError,
    CheckpointException,
)


Place = tuple[str, int]
"""Name of a file, and the first byte of a part."""
Piece = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Offset and size of a piece in the tensor of its part; None if the part is not a tensor."""


def read_common(folder: Path) -> dict[str, Any]:
    """Return the values in a checkpoint that are equal on all ranks. Raises CheckpointError."""
    from megatron.core import dist_checkpointing

    with reading(folder) as reader, files_read_by(reader):
        return dist_checkpointing.load_common_state_dict(str(folder))


def read_state(sharded: dict[str, Any], folder: Path) -> Any:
    """Read this rank's part of a state, described by `sharded`. Collective. Raises CheckpointError on all ranks."""
    from megatron.core import dist_checkpointing

    with reading(folder) as reader, files_read_by(reader):
        strategy = _Together(folder, _SharedReader(str(folder), reader.read_metadata(), _verifier(folder)))
        return dist_checkpointing.load(sharded, str(folder), sharded_strategy=strategy)  # pyrefly: ignore


class _Together:
    """Strategy of megatron-core for loading that fails on all ranks if it fails on one."""

    def __init__(self, folder: Path, reader: "_SharedReader"):
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

        self._own, self._folder, self._reader = TorchDistLoadShardedStrategy(), folder, reader

    def load(self, *arguments: Any) -> Any:
        found, failure = None, ""
        try:
            with _errors_named(self._folder), files_read_by(self._reader):
                found = self._own.load(*arguments)
        except CheckpointError as error:
            failure = str(error)
        if not self._reader.has_asked:
            self._reader.ask({}, failure)
        if failures := [one for one in all_gather(failure) if one]:
            raise CheckpointError(failures[0])
        return found


class _SharedReader(PartReader):
    """Reads a checkpoint with all ranks."""

    has_asked = False

    def ask(self, pieces: Mapping[Place, Sequence[Piece]], failure: str = "") -> list[Mapping[Place, Sequence[Piece]]]:
        """Return the pieces that each rank needs, by part. Collective, and the first step of all ranks. `failure`: why
        this rank cannot read. Raises CheckpointError: another rank cannot."""
        self.has_asked = True
        everyone = all_gather((pieces, failure))
        if failures := [one for _, one in everyone if one and not failure]:
            raise CheckpointError(failures[0])
        return [own for own, _ in everyone]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See torch's StorageReader. Collective."""
        own = defaultdict[Place, list[ReadItem]](list)
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            own[info.relative_path, info.offset].append(item)
        everyone = self.ask({place: [_piece(item) for item in items] for place, items in own.items()})
        needs = defaultdict[Place, dict[int, Sequence[Piece]]](dict)
        for rank, asked in enumerate(everyone):
            for place, pieces in asked.items():
                needs[place][rank] = pieces
        parts = {
            (info.relative_path, info.offset): (info.length, _dtype(self.read_metadata(), stored.fqn))
            for stored, info in self.storage_data.items()
        }
        lengths = {place: parts[place][0] for place in needs}
        owners = _owners(needs, lengths, len(everyone))
        failure: BaseException | None = None
        rounds = _rounds(owners, lengths)
        to_read = [(place, parts[place][0]) for one in rounds for place in one if owners[place] == dist.get_rank()]
        threads = min(rank_threads(), _THREADS)
        with closing(_in_threads(lambda place: self._read(place, *parts[place]), to_read, threads)) as ahead:
            for places in rounds:
                results = [(place, next(ahead)) for place in places if owners[place] == dist.get_rank()]
                try:
                    mine = {place: result.result() for place, result in results}
                except (CheckpointError, *_OF_DAMAGED_FILES) as error:
                    # The others wait for this rank's pieces.
                    failure, mine = failure or error, {}
                for place, pieces in self._exchanged(places, mine, needs, owners, parts):
                    if pieces:
                        _put(own[place], pieces, planner)
                    else:
                        # The part's owner names the cause.
                        failure = failure or CheckpointError("")
        if failure is not None:
            raise failure
        done = Future[None]()
        done.set_result(None)
        return done

    def _read(self, place: Place, length: int, dtype: torch.dtype | None) -> Tensor:
        content = self.part(*place, length)
        return torch.frombuffer(content, dtype=torch.uint8) if dtype is None else tensor_within(content)

    @staticmethod
    def _exchanged(
        places: Sequence[Place],
        mine: Mapping[Place, Tensor],
        needs: Mapping[Place, Mapping[int, Sequence[Piece]]],
        owners: Mapping[Place, int],
        parts: Mapping[Place, tuple[int, torch.dtype | None]],
    ) -> Iterator[tuple[Place, list[Tensor]]]:
        """Send pieces of this rank's parts, and yield those that it needs, by part; none of a part that failed."""
        rank, device = dist.get_rank(), _device()
        messages, received = list[dist.P2POp](), dict[Place, Tensor]()
        for number, place in enumerate(places):
            length, dtype = parts[place]
            sizes = {other: _nbytes(pieces, dtype, length) for other, pieces in needs[place].items()}
            if owners[place] == rank:
                # Replicas need the same pieces.
                sent = dict[Any, Tensor]()
                for other, pieces in needs[place].items():
                    if other == rank:
                        continue
                    if (key := tuple(pieces)) not in sent:
                        sent[key] = _message(mine.get(place), pieces, sizes[other]).to(device)
                    messages.append(dist.P2POp(dist.isend, sent[key], other, tag=number))
            elif rank in sizes:
                received[place] = torch.empty(1 + sizes[rank], dtype=torch.uint8, device=device)
                messages.append(dist.P2POp(dist.irecv, received[place], owners[place], tag=number))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        for place, whole in mine.items():
            if rank in needs[place]:
                yield place, [_taken(whole, piece) for piece in needs[place][rank]]
        for place, message in received.items():
            yield place, list(_pieces(message[1:], needs[place][rank], *parts[place])) if message[0] else []


def _device() -> torch.device:
    """Return the device whose tensors ranks exchange."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _dtype(index: Any, name: str) -> torch.dtype | None:
    """Return the dtype of a saved tensor; None for another object."""
    stored = index.state_dict_metadata[name]
    return stored.properties.dtype if isinstance(stored, TensorStorageMetadata) else None


def _owners(needs: Mapping[Place, Mapping[int, Any]], lengths: Mapping[Place, int], ranks: int) -> dict[Place, int]:
    """Return who reads each part: of the ranks that need it, the one with the fewest bytes so far."""
    read, owners = [0] * ranks, dict[Place, int]()
    for place in sorted(needs, key=lambda one: (len(needs[one]), -lengths[one], one)):
        owner = owners[place] = min(needs[place], key=lambda rank: (read[rank], rank))
        read[owner] += lengths[place]
    return owners


def _rounds(owners: Mapping[Place, int], lengths: Mapping[Place, int]) -> list[list[Place]]:
    """Divide the parts into rounds, in which each rank reads about `_ROUND` bytes, in the order of its files."""
    rounds, read = defaultdict[int, list[Place]](list), Counter[int]()
    for place in sorted(owners):
        rounds[read[owners[place]] // _ROUND].append(place)
        read[owners[place]] += lengths[place]
    return [rounds[number] for number in sorted(rounds)]


def _in_threads(
    read: Callable[[Place], Tensor], parts: Sequence[tuple[Place, int]], threads: int
) -> Generator[Result[Tensor], None, None]:
    """Yield the results of reading `parts` (place and bytes) in order. Threads read up to `_AHEAD` bytes ahead."""
    waiting, begun, ahead = deque(parts), deque[tuple[Result[Tensor], int]](), 0
    pool = ThreadPoolExecutor(threads)
    try:
        while waiting or begun:
            while waiting and (not begun or ahead + waiting[0][1] <= _AHEAD):
                place, length = waiting.popleft()
                begun.append((pool.submit(read, place), length))
                ahead += length
            result, length = begun.popleft()
            ahead -= length
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


def _piece(item: ReadItem) -> Piece:
    return None if item.type == LoadItemType.BYTE_IO else (tuple(item.storage_offsets), tuple(item.lengths))


def _nbytes(pieces: Sequence[Piece], dtype: torch.dtype | None, length: int) -> int:
    """Return the bytes of pieces of a part that has `length` bytes."""
    return sum(length if piece is None or dtype is None else prod(piece[1]) * dtype.itemsize for piece in pieces)


def _taken(whole: Tensor, piece: Piece) -> Tensor:
    for axis, (offset, size) in enumerate(zip(*piece, strict=True)) if piece is not None else ():
        whole = whole.narrow(axis, offset, size)
    return whole


def _message(whole: Tensor | None, pieces: Sequence[Piece], nbytes: int) -> Tensor:
    """Return a mark and the joined pieces of a part, uint8 [1 + bytes]. The mark is 0 if the part could not be read."""
    if whole is None:
        return torch.zeros(1 + nbytes, dtype=torch.uint8)
    joined = [_taken(whole, piece).reshape(-1).view(torch.uint8) for piece in pieces]
    return torch.cat([torch.ones(1, dtype=torch.uint8), *joined])


def _pieces(message: Tensor, pieces: Sequence[Piece], length: int, dtype: torch.dtype | None) -> Iterator[Tensor]:
    """Divide a message again."""
    sizes = [_nbytes([piece], dtype, length) for piece in pieces]
    for own, piece in zip(message.split(sizes), pieces, strict=True):
        # A copy is aligned.
        yield own if piece is None or dtype is None else own.clone().view(dtype).view(piece[1])


def _put(items: Sequence[ReadItem], pieces: Sequence[Tensor], planner: LoadPlanner) -> None:
    """Put pieces of a part where the plan wants them."""
    for item, piece in zip(items, pieces, strict=True):
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(bytes(piece.cpu().numpy())))
        else:
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)


@contextmanager
def _errors_named(folder: Path) -> Iterator[None]:
    """Raise CheckpointError for errors from reading a checkpoint within the block."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        yield
    except (CheckpointingException, *_OF_DAMAGED_FILES) as error:
        # torch collects the errors of all ranks; here each reads alone.
        (cause, _), *_ = [*error.failures.values()] if isinstance(error, CheckpointException) else [(error, None)]
        if isinstance(cause, CheckpointError):
            raise cause from error
        raise CheckpointError(f"the policy cannot be read from {folder}: {first_line(cause)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def reading(folder: Path) -> Iterator[PartReader]:
    """Yield torch's reader of a checkpoint, which compares each part with its digest and reads no other objects within
    the block. Raises CheckpointError for errors in the block."""
    with _errors_named(folder), reading_only(folder) as index:
        yield PartReader(str(folder), index, _verifier(folder))


def _verifier(folder: Path) -> Callable[[str, int, mmap.mmap], None]:
    """Return the `verify` of `PartReader`. It raises CheckpointError: a part has changed."""
    recorded = load(folder.parent)
    parts: dict[str, Mapping[int, Part]] = {}
    for name, own in ({} if recorded is None else recorded.parts).items():
        begins = accumulate((length for length, _ in own), initial=0)
        parts[Path(name).name] = {begin: (length, digest) for begin, (length, digest) in zip(begins, own, strict=False)}

    def verify(name: str, begin: int, content: mmap.mmap) -> None:
        length, digest = parts[name].get(begin, (0, "")) if name in parts else (len(content), None)
        if length != len(content) or (digest is not None and not has_digest(content, digest)):
            raise has_changed(folder.parent, f"{folder.name}/{name}")

    return verify


@contextmanager
def reading_only(folder: Path) -> Iterator[Any]:
    """Restrict torch and megatron-core to reading tensors and their index from `folder` within the block. Yields the
    index. Raises CheckpointError: there is no index, or it names other objects."""
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            index = _IndexOnly(file).load()
    # A damaged pickle may raise anything.
    except Exception as error:
        raise CheckpointError(f"{path} is not a checkpoint's index: {error}") from error
    before = os.environ.get(_TENSORS_ONLY)
    os.environ[_TENSORS_ONLY] = "1"
    try:
        yield index
    finally:
        del os.environ[_TENSORS_ONLY]
        if before is not None:
            os.environ[_TENSORS_ONLY] = before


class _IndexOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        constants = (torch.dtype, torch.layout, torch.memory_format)
        if (module, name) in _NAMES or (module == "torch" and isinstance(getattr(torch, name, None), constants)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
