"""Clients of the policy and the teacher in Ray actors, which split batches over replicas and combine the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, pairwise
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from nemo_rl_lite.checkpoint.store import Part
from nemo_rl_lite.cluster.calls import Call, wait
from nemo_rl_lite.cluster.workers import WorkerGroup
from nemo_rl_lite.config.schema import Config, RefitConfig
from nemo_rl_lite.config.sizes import LEAST_SAVED
from nemo_rl_lite.config.sources import source_configs, teacher_configs
from nemo_rl_lite.errors import CheckpointError, WorkerError
from nemo_rl_lite.losses.batch import (
    CountedRows,
    RowBatch,
    RowSource,
    Share,
    SharedRows,
    TokenRow,
    TokenRows,
    trained_of_episodes,
)
from nemo_rl_lite.losses.interface import Loss, combine_metrics, count_masked, counts_of, mean_of_steps, summary
from nemo_rl_lite.models.flops import forward_cost
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.planning.parameters import SequenceFlops
from nemo_rl_lite.policy.balance import even_work
from nemo_rl_lite.policy.interface import SAVED_WORK, BatchRef, ParallelPlace, Scored, Work, with_scores
from nemo_rl_lite.policy.micro_batches import Cost, Layout, balanced_shares
from nemo_rl_lite.policy.score_files import ScoreFile
from nemo_rl_lite.refit.interface import WeightSource
from nemo_rl_lite.refit.ipc import SharedWeights
from nemo_rl_lite.refit.layout import RefitPlan
from nemo_rl_lite.refit.trace import Recipe
from nemo_rl_lite.refit.windows import Piece, Transfer, WindowRoutes
from nemo_rl_lite.workers.stragglers import Stragglers

# Metrics that are equal on all replicas, which are not summed.
WHOLE_METRICS = ("grad_norm", "lr", "wd", "skipped_steps")
_SCORING = "teacher logprobs"
# Seconds for the answer of an idle worker.
_DESCRIBE_S = 60.0
# A teacher's metrics: names of its worker -> logged names.
MEMORY = {
    "measured/logprob/teacher_weights": "measured/logprob/teacher_weights",
    "policy_peak_bytes/logprob": "teacher_peak_bytes/logprob",
}


class RemotePolicy:
    """`Policy` over a group of started `MegatronWorker`s."""

    def __init__(
        self,
        group: WorkerGroup,
        global_batch: int,
        together: int = 1,
        flops: SequenceFlops | None = None,
        layout: Layout | None = None,
        iterations: int = 1,
        siblings: int = 1,
        equally_many: bool = False,
    ):
        """Create a client.

        Args:
            global_batch: episodes, or sequences of datasets, of an optimizer step.
            together: neighbouring sequences that a loss compares, such as 2 for pairs.
            flops: FLOPs of a sequence; None for an unknown architecture, whose work is counted in tokens.
            layout: layout of training micro-batches.
            iterations: training passes over a batch.
            siblings: neighbouring rows that share a prompt. If the model shares prompts, and theirs are long enough,
                they stay on a replica. Their number must divide a replica's rows; otherwise a divisor of it does.
            equally_many: replicas get equally many rows, even if their work then differs.
        """
        self.group, self._global_batch, self._together, self._flops = group, global_batch, together, flops
        self._layout, self._iterations = layout, iterations
        self._equally_many = equally_many
        self._cost: Cost = float if flops is None else cache(flops.forward)
        self._replicas = Replicas(group)
        self._siblings = siblings if self._replicas.share_prompts else 1
        self._held: dict[str, BatchRef] = {}
        self._stragglers = Stragglers(self._replicas.describe)
        # Work of each replica by batch, if no prompts are shared, and that of the last training.
        self._work: dict[str, list[float]] = {}
        self._trained: list[float] = []
        # Mismatch metrics by batch, and the batches without previous logprobs.
        self._mismatch: dict[str, list[dict[str, float]]] = {}
        self._unscored: set[str] = set()
        # Share of its forward FLOPs that shared prompts saved in the training of a batch.
        self._saved: dict[str, float] = {}

    def prepare_for_logprob(self) -> None:
        wait(self.group.call("prepare_for_logprob"))

    def put_batch(self, rows: Sequence[TokenRow], name: str = "train") -> BatchRef:
        rows = rows if isinstance(rows, CountedRows) else TokenRows.of(rows)
        batch, count = BatchRef(name, rows, self._split(rows)), len(rows)
        split = batch.of_replicas()
        copied = count - self._together if rows.episodes is None else int(rows.lengths.argmin())
        shares = [[index if index < count else copied + index % self._together for index in own] for own in split]
        self._replicas.put_batch(rows, shares, name)
        lengths = [*rows.lengths.tolist(), 1]
        # Fillers are copies of rows, or have one token.
        own_rows = shares if rows.episodes is None else [[min(row, count) for row in own] for own in split]
        self._work[name] = [sum(self._cost(lengths[row]) for row in own) for own in own_rows]
        if rows.episodes is not None:
            trained, places = trained_of_episodes(rows)
            fillers = [[place for place, index in enumerate(own) if index >= count] for own in split]
            tokens = [trained[places[own]] for own in shares]
            self._replicas.call("join_episodes", list(zip(tokens, fillers, strict=True)), name)
        self._held[name], self._mismatch[name], self._saved[name] = batch, [], 0.0
        self._unscored.add(name)
        return batch

    def score(self, batch: BatchRef, which: Sequence[Scored]) -> None:
        name, counts = self._name(batch), count_masked(batch.rows)
        policies = tuple("previous" if one == "later" else one for one in which)
        firsts = [own.stop if "later" in which else 0 for own in batch.slices(0)]
        measured = self._replicas.call_each("score", [(policies, counts, name, first) for first in firsts], "logprobs")
        self._mismatch[batch.name] = [share for share in measured if share]
        if "previous" in which:
            self._unscored.discard(batch.name)

    def work(self, batch: BatchRef, which: Sequence[Scored]) -> Work | None:
        if self._flops is None:
            return None
        lengths, scoring, first = batch.rows.lengths.tolist(), 0.0, self._steps(batch.rows)[0].stop
        for one in which:
            forward = self._flops.reference if one == "reference" else self._flops.forward
            scoring += sum(map(forward, lengths[first:] if one == "later" else lengths))
        training = self._iterations * sum(map(self._flops.training, lengths))
        # Packs for logprobs save about as much as those for training.
        computed = 1 - self._saved[batch.name]
        return Work(computed * scoring, computed * training)

    def evaluate(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        whole = len(batch.rows)
        own = [(sum(index < whole for index in share),) for share in batch.of_replicas()]
        common = (loss, counts_of(loss, batch.rows), self._name(batch))
        replicas = self._replicas.call("evaluate", own, *common, phase="validation")
        return summary(loss, [metrics for metrics in replicas if metrics is not None])

    def logprobs(self, tokens_BT: Tensor, lengths_B: Tensor, phase: str = "probe") -> Tensor:
        """Return logprobs of any number of rows. Copies of the last row fill up the replicas and are dropped."""
        rows, count = len(tokens_BT), self._replicas.count
        index = torch.arange(-(-rows // count) * count).clamp(max=rows - 1)
        shards = zip(tokens_BT[index].chunk(count), lengths_B[index].chunk(count), strict=True)
        return torch.from_numpy(np.concatenate(self._replicas.call("logprobs", list(shards), phase))[:rows])

    def prepare_for_training(self) -> None:
        wait(self.group.call("prepare_for_training"))

    def prepare_for_refit(self, engine_bytes: int) -> None:
        """Enter the refit phase. Moves to the host may overlap with colocated engines, which take `engine_bytes` of
        each device."""
        wait(self.group.call("prepare_for_refit", engine_bytes))

    def prepare_for_generation(self) -> None:
        wait(self.group.call("prepare_for_generation"))

    def train(self, batch: BatchRef, loss: Loss) -> dict[str, float]:
        steps, name = [], self._name(batch)
        sampled = isinstance(batch.rows, CountedRows) or batch.rows[0].generation_logprobs is not None
        compared = name in self._unscored and sampled
        mismatch = self._mismatch[name]
        saved = np.zeros(self._replicas.count)
        for step, rows in [*enumerate(self._steps(batch.rows))] * self._iterations:
            counts = counts_of(loss, batch.rows[rows.start : rows.stop])
            of_all = count_masked(batch.rows) if compared and step == 0 else None
            arguments = [(loss, counts, own, name, of_all) for own in batch.slices(step)]
            replicas, shares = zip(*self._replicas.call_each("train", arguments), strict=True)
            saved += [one.pop(SAVED_WORK, 0.0) for one in replicas]
            steps.append(summary(loss, replicas) | {whole: replicas[0][whole] for whole in WHOLE_METRICS})
            mismatch = mismatch + [own for own in shares if own]
        saved /= self._iterations
        self._trained = (np.asarray(self._work[name]) - saved).tolist()
        self._saved[name] = saved.sum() / sum(map(self._cost, batch.rows.lengths.tolist()))
        return mean_of_steps(steps) | (combine_metrics(mismatch) if mismatch else {})

    def write_scores(self, batch: BatchRef, loss: Loss, target: ScoreFile) -> Callable[[], list[str]]:
        count = len(batch.rows)
        samples = np.arange(count) if batch.rows.episodes is None else batch.rows.episodes
        segments = np.arange(count) - np.searchsorted(samples, samples)
        # Copies that fill up the replicas are not written.
        places = np.append(np.stack([samples, segments]), [[target.count], [0]], axis=1)
        own = [(places[:, np.minimum(share, count)],) for share in batch.of_replicas()]
        self._replicas.call("write_scores", own, target, loss, self._name(batch), phase="scores")
        return lambda: [error for errors in self._replicas.call("scores_written", phase="scores") for error in errors]

    def follow_policy(self, share: float) -> None:
        wait(self.group.call("follow_policy", share))

    def begin_save(self, folder: str) -> None:
        self._checkpoint("begin_save", folder)

    def save_is_written(self) -> bool:
        return all(wait(self.group.call("save_is_written", phase="checkpoint")))

    def finish_save(self) -> dict[str, list[Part]]:
        return {name: parts for own in self._checkpoint("finish_save") for name, parts in own.items()}

    def load(self, folder: str) -> None:
        self._checkpoint("load", folder)

    def export_hf(self, path: str) -> None:
        wait(self.group.call("export_hf", path))

    def pop_memory(self) -> dict[str, float]:
        ranks = wait(self.group.call("pop_memory"))
        names = sorted({name for peaks in ranks for name in peaks})
        return {name: max(peaks.get(name, 0.0) for peaks in ranks) for name in names}

    def release_host_memory(self) -> None:
        wait(self.group.call("release_host_memory"))

    def pop_moves(self) -> dict[str, Move]:
        return combine_moves(wait(self.group.call("pop_moves")))

    def take_waits(self) -> dict[str, float]:
        if self._replicas.count == 1:
            return {}
        passes = self._replicas.passes()
        waits = idle_shares(list(chain.from_iterable(passes)))
        if "train" in waits:
            seconds = [sum(sum(own["train"]) for own in ranks) / len(ranks) for ranks in passes]
            waits["slowdown/train"] = self._stragglers.note(seconds, self._trained)
        return waits

    @property
    def ranks(self) -> int:
        return len(self.group)

    def plan_refit(
        self,
        config: RefitConfig,
        shared_device: bool,
        adapters_alone: bool,
        consumers: Sequence[int],
        timeout_s: float,
    ) -> RefitPlan:
        """See `MegatronWorker.plan_refit`; `consumers` has a number for each rank."""
        arguments = [(config, shared_device, count, adapters_alone) for count in consumers]
        return wait(self.group.call_each("plan_refit", arguments), timeout_s=timeout_s)[0]

    def use_shared_weights(self, weights: Sequence[SharedWeights | None]) -> None:
        """See `MegatronWorker.use_shared_weights`; `weights` has those of each rank's engine, or None."""
        wait(self.group.call_each("use_shared_weights", [(one,) for one in weights]))

    def open_refit(self, timeout_s: float) -> list[tuple[str, int, WeightSource | None]]:
        """Return each rank's host, port and source of weights."""
        hosts = [host for host, _ in self.group.addresses(timeout_s)]
        opened = wait(self.group.call_each("open_refit", [(host,) for host in hosts]), timeout_s=timeout_s)
        return [(host, *own) for host, own in zip(hosts, opened, strict=True)]

    def join_refit(self, consumers: Sequence[int]) -> Call:
        """Join the engines, whose number of ranks `consumers` has for each rank; ends after their `join_refit`."""
        return self.group.call_each("join_refit", [(count,) for count in consumers])

    def refit_recipe(self) -> Recipe | None:
        """See `MegatronWorker.refit_recipe`."""
        return wait(self.group.call("refit_recipe"))[0]

    def route_windows(self, needs: Mapping[int, Sequence[Piece]]) -> list[Transfer]:
        """Return the transfers to one engine's ranks; see `windows.route`."""
        return wait(self.group.call_one(0, [("route_windows", (needs,))], "route_windows"))[0]

    def join_windows(self, routes: Sequence[WindowRoutes]) -> Call:
        """Join the engines for each rank's transfers, and send the weights; ends after the engines' `join_windows`."""
        return self.group.call_each("join_windows", [(one,) for one in routes])

    def send_weights(self) -> Call:
        """Send new weights; ends after the consumers' `receive_weights`."""
        return self.group.call("send_weights", phase="refit")

    def _checkpoint(self, method: str, *arguments: str) -> list[Any]:
        try:
            return wait(self.group.call(method, *arguments, phase="checkpoint"))
        except WorkerError as error:
            # With ranks stuck in a collective, no further save can work.
            if error.raised == CheckpointError.__name__ and not error.others_running:
                raise CheckpointError(error.cause.removeprefix(f"{error.raised}: ")) from error
            raise

    def _steps(self, rows: RowBatch) -> list[range]:
        """Return the rows of each optimizer step."""
        first = np.arange(len(rows)) if rows.episodes is None else np.flatnonzero(np.diff(rows.episodes, prepend=-1))
        return [range(*ends) for ends in pairwise([*first[:: self._global_batch].tolist(), len(rows)])]

    def _split(self, rows: RowBatch) -> list[list[list[int]]]:
        """Return the row indices of each optimizer step and replica, with similar work. If replicas would have no row,
        indices of `len(rows)` or more fill them up. Fillers of episodes are a token without a loss."""
        lengths, count, split = rows.lengths.tolist(), self._replicas.count, []
        for own_rows in self._steps(rows):
            missing = max(0, count * self._together - len(own_rows))
            index = [*own_rows, *range(len(rows), len(rows) + missing)]
            of_step = [*lengths[own_rows.start : own_rows.stop], *[1] * missing]
            neighbours, prompts = max(self._together, gcd(self._siblings, len(index), len(index) // count)), None
            if neighbours > self._together:
                prompts = self._shared_prompts(rows, own_rows, neighbours)
                neighbours = self._together if prompts is None else neighbours
            shares = balanced_shares(of_step, count, self._cost, neighbours, self._layout, self._equally_many, prompts)
            split.append([[index[row] for row in share] for share in shares])
        return split

    def _shared_prompts(self, rows: RowBatch, step: range, neighbours: int) -> list[int] | None:
        """Return the tokens of the prompt that each group of this many neighbours can share; None if they would save
        too few of the step's tokens. Fillers share none."""
        own = slice(step.start, step.start + len(step) // neighbours * neighbours)
        lengths = rows.lengths[own]
        prompts = (lengths - rows.trained[own]).reshape(-1, neighbours).min(1)
        if (neighbours - 1) * prompts.sum() <= LEAST_SAVED * lengths.sum():
            return None
        return prompts.tolist()

    def _name(self, batch: BatchRef) -> str:
        if self._held.get(batch.name) is not batch:
            raise ValueError(f"the workers hold a newer batch {batch.name!r}")
        return batch.name


class RemoteTeacher:
    """`Teacher` over a group of started `TeacherWorker`s."""

    def __init__(self, group: WorkerGroup, teachers: Mapping[str, int], costs: Sequence[Cost]):
        """`teachers`: number of each source's teacher. `costs`: work of a sequence for each teacher, by its number of
        tokens."""
        self.group, self._teachers, self._costs = group, teachers, costs
        self._replicas = Replicas(group)

    @classmethod
    def of(cls, config: Config, group: WorkerGroup) -> "RemoteTeacher":
        """Create the teachers of a run. Each `teacher.model_name` must be a folder."""
        models = [str(one.teacher.model_name) for one in teacher_configs(config).values()]
        numbers = {name: models.index(str(one.teacher.model_name)) for name, one in source_configs(config).items()}
        return cls(group, numbers, [forward_cost(Path(model)) for model in models])

    def scored(self, rows: RowBatch, sources: Sequence[str]) -> RowBatch:
        """See `Teacher.scored`. The teachers take turns. Scores of rows that are elsewhere stay with their teacher,
        until it scores again."""
        teacher_of = np.array([self._teachers[source] for source in sources])
        used = sorted({*teacher_of.tolist()})
        shares = {one: self._shares(rows, np.flatnonzero(teacher_of == one), one) for one in used}
        if isinstance(rows, CountedRows):
            # A rollout worker that has died leaves the teachers where they are.
            parts = {one: rows.share([(share.tolist(), ()) for share in own]) for one, own in shares.items()}
            for teacher, found in parts.items():
                arguments = [(teacher, part.order, *part.parts) for part in found]
                self._in_turn(teacher, partial(self._replicas.call_each, "score_parts", arguments, _SCORING))
            owners = {
                int(place): (replica, teacher, number)
                for teacher, own in shares.items()
                for replica, share in enumerate(own)
                for number, place in enumerate(rows.places[share])
            }
            return replace(rows, source=_ScoredRows(rows.source, self._replicas, owners))
        scores = []
        for teacher, own in shares.items():
            given = [(rows.select(share.tolist()),) for share in own]
            scores += self._in_turn(teacher, partial(self._replicas.call, "score", given, teacher, phase=_SCORING))
        return with_scores(rows, [share for own in shares.values() for share in own], scores)

    def _shares(self, rows: RowBatch, index: np.ndarray, teacher: int) -> list[np.ndarray]:
        """Return each replica's rows of `index`. Copies of the last row give every replica one."""
        replicas = self._replicas.count
        filled = index[np.arange(max(len(index), replicas)).clip(max=len(index) - 1)]
        owned = even_work([self._costs[teacher](int(rows.lengths[row])) for row in filled], replicas)
        return [filled[own] for own in owned]

    def _in_turn(self, teacher: int, score: Callable[[], Any]) -> Any:
        """Return the result of `score`, which is called while the teacher's weights are on the device."""
        wait(self.group.call("prepare_for_logprob", teacher, phase=_SCORING))
        found = score()
        wait(self.group.call("leave", phase=_SCORING))
        return found

    def pop_memory(self) -> dict[str, float]:
        ranks = wait(self.group.call("pop_memory"))
        there = {kept for kept in MEMORY if any(kept in peaks for peaks in ranks)}
        return {MEMORY[kept]: max(peaks.get(kept, 0.0) for peaks in ranks) for kept in sorted(there)}

    def pop_moves(self) -> dict[str, Move]:
        return combine_moves(wait(self.group.call("pop_moves")))


@dataclass(frozen=True)
class _ScoredRows:
    """`RowSource` of rows whose scores are with the teacher's replicas."""

    rows: RowSource
    replicas: "Replicas"
    owners: Mapping[int, tuple[int, int, int]]
    """Replica, teacher, and number among the rows that these have scored, by index of the row."""

    def share(self, shares: Sequence[Share]) -> list[SharedRows]:
        """See `RowSource.share`."""
        return [
            replace(one, scores=tuple(call.references[0] for call in calls), scored=places)
            for one, (rows, _) in zip(self.rows.share(shares), shares, strict=True)
            for calls, places in [self._scores(rows)]
        ]

    def fetch(self, index: Sequence[int]) -> TokenRows:
        """See `RowSource.fetch`."""
        calls, places = self._scores(index)
        return with_scores(self.rows.fetch(index), places, wait(*calls))

    def apply(self, function: Callable[[TokenRows], Any], index: Sequence[int]) -> Any:
        """See `RowSource.apply`."""
        calls, places = self._scores(index)
        references = [call.references[0] for call in calls]
        return self.rows.apply(partial(_applied, function, places, references), index)

    def _scores(self, index: Sequence[int]) -> tuple[list[Call], tuple[np.ndarray, ...]]:
        """Ask the replicas for the scores of these rows. Return the calls, and the places of their rows in `index`."""
        found = [self.owners[row] for row in index]
        calls, places = [], []
        for replica, teacher in sorted({(replica, teacher) for replica, teacher, _ in found}):
            own = [place for place, owner in enumerate(found) if owner[:2] == (replica, teacher)]
            places.append(np.array(own, np.int64))
            numbers = [found[place][2] for place in own]
            calls.append(self.replicas.ask(replica, "scores", teacher, numbers, phase=_SCORING))
        return calls, tuple(places)


def _applied(
    function: Callable[[TokenRows], Any], places: Sequence[np.ndarray], scores: Sequence[Any], rows: TokenRows
) -> Any:
    """Return `function` of the rows with the scores behind references."""
    return function(with_scores(rows, places, ray.get(list(scores))))


class Replicas:
    """Data-parallel replicas of a group of started workers, each of which has a `ParallelPlace`."""

    def __init__(self, group: WorkerGroup):
        self._group = group
        self._places: list[ParallelPlace] = wait(group.call("place"))
        self.count, self.share_prompts = self._places[0].data_size, self._places[0].shares_prompts

    def put_batch(self, rows: RowBatch, shares: Sequence[Sequence[int]], name: str) -> None:
        """Give each replica's rows to its ranks, with the routed experts of a rank's layers. They are stored once for
        the ranks with the same layers."""
        wanted = [(place.data_rank, place.replayed_layers) for place in self._places]
        kinds = list(dict.fromkeys(wanted))
        if isinstance(rows, CountedRows):
            found = rows.share([(shares[replica], layers) for replica, layers in kinds])
            given = [(name, one.order, one.scored, *one.parts, *one.scores) for one in found]
            method = "put_parts"
        else:
            parts = [rows.select(shares[replica]).with_layers(layers) for replica, layers in kinds]
            method, given = "put_batch", [(self._group.put(part), name) for part in parts]
        of_kind = dict(zip(kinds, given, strict=True))
        wait(self._group.call_each(method, [of_kind[kind] for kind in wanted], "put_batch"))

    def call(self, method: str, own: Sequence[Sequence[Any]] | None = None, *common: Any, phase: str = "") -> list[Any]:
        """Call a method of every rank; return one result per replica, in order. Each replica's `own` arguments are
        stored once for its ranks."""
        shared = [[self._group.put(value) for value in values] for values in own or [()] * self.count]
        return self.call_each(method, [(*values, *common) for values in shared], phase)

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]], phase: str = "") -> list[Any]:
        """Call a method of every rank, with the arguments of its replica, whose references are resolved. Return one
        result per replica, in order."""
        results = wait(self._group.call_each(method, [arguments[place.data_rank] for place in self._places], phase))
        reported = {p.data_rank: result for p, result in zip(self._places, results, strict=True) if p.reports}
        return [reported[replica] for replica in range(self.count)]

    def passes(self) -> list[list[Mapping[str, Sequence[float]]]]:
        """Return the seconds of passes of each replica's context ranks, by phase. These ranks may have different
        micro-batches."""
        found: list[list[Mapping[str, Sequence[float]]]] = [[] for _ in range(self.count)]
        for place, own in zip(self._places, wait(self._group.call("take_passes")), strict=True):
            if place.has_logits and place.tensor_rank == 0:
                found[place.data_rank].append(own)
        return found

    def describe(self, replica: int) -> str:
        """Return a replica's ranks, with their hosts and GPUs."""
        hosts, gpus = self._group.addresses(_DESCRIBE_S), self._group.gpus(_DESCRIBE_S)
        own = [rank for rank, place in enumerate(self._places) if place.data_rank == replica]
        shown = [
            f"rank {rank} on {hosts[rank][0]}" + (f" (GPU {', '.join(gpus[rank])})" if gpus[rank] else "")
            for rank in own
        ]
        return f"{self._group.name} replica {replica}: {'; '.join(shown)}"

    def ask(self, replica: int, method: str, *arguments: Any, phase: str) -> Call:
        """Call a method of the rank that reports the results of a replica."""
        (rank,) = [rank for rank, one in enumerate(self._places) if one.data_rank == replica and one.reports]
        return self._group.call_one(rank, [(method, arguments)], phase)


def idle_shares(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return `Policy.take_waits` from the pass times of replicas' ranks, by phase. Ranks start each pass together."""
    found: dict[str, float] = {}
    for phase in ranks[0]:
        passes = list(zip(*(own[phase] for own in ranks), strict=True))
        slowest = sum(map(max, passes))
        found |= {phase: slowest, f"idle_share/{phase}": 1 - sum(map(sum, passes)) / len(ranks) / slowest}
    return found


def combine_moves(ranks: Sequence[Sequence[tuple[str, Move]]]) -> dict[str, Move]:
    """Combine moves by name. A rank's moves of one name are summed; over ranks, the slowest counts. The exposed time is
    the maximum over ranks."""
    combined: dict[str, Move] = {}
    for name in sorted({name for moves in ranks for name, _ in moves}):
        of_ranks = []
        for moves in ranks:
            own = [move for other, move in moves if other == name]
            nbytes, transfer_s = sum(move.nbytes for move in own), sum(move.transfer_s for move in own)
            of_ranks.append(Move(nbytes, transfer_s, sum(move.exposed_s for move in own)))
        slowest = max(of_ranks, key=lambda move: move.transfer_s)
        combined[name] = replace(slowest, exposed_s=max(move.exposed_s for move in of_ranks))
    return combined
