"""Assignment of requests to engines, and their order. `queue.py` drives it."""

import asyncio
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest

from nemo_rl_lite.config.sizes import LONG_PROMPT, TOGETHER
from nemo_rl_lite.generation.admission import Admission, ResponseLengths
from nemo_rl_lite.generation.interface import Completion, Conversation, EngineLoad, Progress, Request, Unfinished

# Seconds for which a conversation keeps its place in a full cache between its turns. Computing its prefix again then
# costs less than the unused part of the cache. That is about the time in which an engine prefills its whole cache.
_KEPT_S = 15.0
# A conversation leaves an engine with this many more than twice the conversations of another. Below, the larger batch
# costs less than computing the prefix again.
_MOVED = 8
# Seconds after which newly known lengths change the order.
_SORTED_S = 1.0
# Turns that the mean wait remembers.
_WAITS = 64
# Added to the number of a request for each further engine. An engine may still have the request of an earlier number.
_AGAIN = 2**40


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its completion and the replica that sampled it."""

    number: int
    """Unique for each engine that gets the request."""
    request: Request
    answer: asyncio.Future[tuple[Completion, int]]
    conversation: Conversation
    progress: Progress | None = None
    recovered: int = field(default=0, init=False)
    """Tokens of a lost engine that the next one takes over."""
    order: int = field(init=False)
    """Place among all requests."""
    _parts: list[Unfinished] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.order = self.number
        if self.request.begun is not None:
            self._parts = [self.request.begun]

    @property
    def begins_rollout(self) -> bool:
        """Return whether the request is the beginning of an episode to train on."""
        return self.request.step > 0 and not self.conversation.tokens and self.request.begun is None

    def add(self, new: Unfinished) -> None:
        """Add tokens of a report."""
        self._parts.append(new)
        if self.progress is not None:
            self.progress(self._joined())

    def so_far(self) -> Unfinished | None:
        """Return the tokens that reports have brought."""
        return self._joined() if self._parts else None

    def _joined(self) -> Unfinished:
        self._parts = [Unfinished.joined(self._parts)]
        return self._parts[0]

    def requeue(self) -> None:
        """Prepare the request for another engine, or again for the same."""
        self.number += _AGAIN
        # Schemas, penalties and alternative tokens would begin again.
        if not self.request.continues or self.request.sampling.options.changed():
            self._parts = []
        self.request = replace(self.request, begun=self.so_far())
        self.recovered = 0 if self.request.begun is None else len(self.request.begun.tokens)


@dataclass
class Stopwatch:
    """Sums the seconds in which it runs."""

    _seconds: float = 0.0
    _since: float | None = None

    def runs(self, is_running: bool) -> None:
        self._seconds, self._since = self.seconds, time.perf_counter() if is_running else None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)


@dataclass
class ReplicaLoad:
    """Requests of one replica: to submit, in progress, and to abort; and its conversations between two turns."""

    admission: Admission
    capacity: int
    """Requests in flight that its KV cache allows."""
    busy: Stopwatch = field(default_factory=Stopwatch)
    between_turns: set[Conversation] = field(default_factory=set)
    aborted: list[int] = field(default_factory=list)
    _new: dict[int, PendingRequest] = field(default_factory=dict)
    _unfinished: dict[int, PendingRequest] = field(default_factory=dict)

    @property
    def is_roomy(self) -> bool:
        """Return whether the cache has room for all requests that the engine may have."""
        return self.capacity == self.admission.most

    @property
    def load(self) -> int:
        return len(self._new) + len(self._unfinished)

    @property
    def conversations(self) -> int:
        """Return the number of requests, and of conversations between two turns."""
        return self.load + sum(not one.ended for one in self.between_turns)

    @property
    def room(self) -> int:
        """Return how many more requests the engine may have."""
        return self.admission.most - self.load

    @property
    def unfinished(self) -> list[int]:
        """Return the numbers of requests that the replica still has."""
        return [*self.aborted, *self._unfinished]

    def takes(self, conversation: Conversation | None = None) -> bool:
        """Return whether the replica takes a request, of this or of any conversation.

        If the cache has no room for all, a conversation keeps its place for a while between its turns. Others then do
        not evict its prefix.
        """
        if self.room <= 0:
            return False
        if self.is_roomy or not self.load or conversation in self.between_turns:
            return True
        return self.load + len(self.between_turns) < self.capacity

    def give(self, asked: PendingRequest) -> None:
        self._new[asked.number] = asked

    @property
    def has_news(self) -> bool:
        return bool(self._new or self.aborted)

    def hand_over(self) -> tuple[dict[int, Request], list[int]]:
        """Return what to send to the replica: new requests by number, and numbers to abort."""
        new, self._new = self._new, {}
        aborted, self.aborted = self.aborted, []
        self._unfinished |= new
        return {number: asked.request for number, asked in new.items()}, aborted

    def finish(self, number: int) -> PendingRequest | None:
        """Return the answered request; None if it was dropped."""
        return self._unfinished.pop(number, None)

    def keep_place(self, conversation: Conversation) -> None:
        """Keep the place of a conversation for its next turn, if its capacity allows."""
        if self.is_roomy or self.load + len(self.between_turns) < self.capacity:
            self.between_turns.add(conversation)

    def add_tokens(self, number: int, new: Unfinished) -> None:
        """Note the new tokens of an unfinished request."""
        asked = self._unfinished.get(number)
        if asked is not None:
            asked.add(new)

    def drop(self, asked: PendingRequest) -> None:
        self._new.pop(asked.number, None)
        if self._unfinished.pop(asked.number, None):
            self.aborted.append(asked.number)

    @property
    def requests(self) -> list[PendingRequest]:
        return [*self._unfinished.values(), *self._new.values()]

    def clear(self) -> None:
        self._new, self._unfinished, self.aborted, self.between_turns = {}, {}, [], set()


class Assignment:
    """Assigns each request to the replica with the fewest unfinished ones, at most `capacity` to each, and fewer where
    the KV cache has no room. Samples of a long prompt go to the same one, up to eight requests more than another has.
    Later turns stay with their replica, unless another has far fewer conversations.

    A replica with `share` requests begins no further episodes to train on. Validations, later turns and responses with
    tokens of a lost replica do not wait for that.

    Of the waiting requests, the earliest step comes first. Within a step, conversations that have begun come first, and
    then those with the longest expected responses.
    """

    def __init__(
        self, replicas: int, capacity: int, clock: Callable[[], float] = time.monotonic, share: int | None = None
    ):
        """`share` is None: `capacity`."""
        self.alive = set(range(replicas))
        self.held = [ReplicaLoad(Admission(capacity), capacity) for _ in range(replicas)]
        self._waiting: list[PendingRequest] = []
        # Requests of conversations with a place.
        self._returning: list[PendingRequest] = []
        self._share, self._sorted_s = capacity if share is None else share, 0.0
        # Hash of the last assigned long prompt, and its replica.
        self._newest = (0, -1)
        self._lengths, self._clock = ResponseLengths(), clock
        # Mean seconds between a turn's end and the next turn.
        self._wait_s = 0.0
        self.idle = Stopwatch()
        """Runs while no replica has a request."""
        self.taken_over = 0
        """Tokens of lost replicas' responses that other replicas have begun to continue."""

    def time(self, is_paused: bool) -> None:
        """Update the stopwatches."""
        self.idle.runs(not any(self.held[replica].load for replica in self.alive))
        for replica, held in enumerate(self.held):
            held.busy.runs(not is_paused and replica in self.alive and held.load > 0)

    def observe(self, replica: int, load: EngineLoad) -> None:
        """Adapt the replica's capacity to its load."""
        held = self.held[replica]
        self._review_places(held)
        held.capacity = held.admission.capacity(load, [one.tokens for one in held.between_turns])

    def _review_places(self, held: ReplicaLoad) -> None:
        """Give up the places of conversations that have ended, or whose next turn takes long."""
        now = self._clock()
        for conversation in list(held.between_turns):
            if conversation.ended:
                self._end(held, conversation)
            elif not held.is_roomy and now > conversation.turn_ended_s + _KEPT_S:
                held.between_turns.discard(conversation)

    def add(self, asked: PendingRequest) -> None:
        conversation, now = asked.conversation, self._clock()
        if conversation.tokens:
            self._wait_s += (now - conversation.turn_ended_s - self._wait_s) / _WAITS
        home = None if conversation.engine is None else self.held[conversation.engine]
        if home is not None and not home.is_roomy and conversation in home.between_turns:
            self._returning.append(asked)
        else:
            self._wait(asked)

    def _wait(self, asked: PendingRequest) -> None:
        insort(self._waiting, asked, key=self._place)

    def assign(self) -> None:
        """Give waiting requests to replicas, in order, while one has room."""
        alive = [self.held[replica] for replica in sorted(self.alive)]
        returning, self._returning = self._returning, []
        for asked in returning:
            if not self._give(asked):
                self._wait(asked)
        if not self._waiting or not any(held.takes() for held in alive):
            return
        if all(held.is_roomy for held in alive) and len(self._waiting) <= sum(held.room for held in alive):
            # The same requests always give the same batches.
            self._waiting.sort(key=lambda asked: (asked.request.step, asked.begins_rollout, asked.order))
        elif (now := self._clock()) > self._sorted_s + _SORTED_S:
            self._waiting.sort(key=self._place)
            self._sorted_s = now
        given = 0
        while given < len(self._waiting) and self._give(self._waiting[given]):
            given += 1
        del self._waiting[:given]

    def _place(self, asked: PendingRequest) -> tuple[int, bool, float, int]:
        """Return the place in the queue; the lowest one starts first."""
        step, conversation = asked.request.step, asked.conversation
        if not self._keeps_places:
            # Without prefixes to save, no conversation should fall behind.
            return step, False, 0.0, asked.order
        if conversation.tokens:
            return step, False, -conversation.tokens, asked.order
        return step, True, -self._lengths.expected(conversation.prompt), asked.order

    @property
    def _keeps_places(self) -> bool:
        return self._wait_s < _KEPT_S

    def _give(self, asked: PendingRequest) -> bool:
        """Give a request to a replica with room, preferably to the one that has the prompt's prefix in its cache.
        Return whether there is one."""
        home = asked.conversation.engine
        if home in self.alive and self.held[home].takes(asked.conversation):
            chosen = self._for_next_turn(home)
        else:
            able = [one for one in self._able if not asked.begins_rollout or self.held[one].load < self._share]
            chosen = min(able, key=lambda replica: (self.held[replica].load, replica), default=None)
            if chosen is not None and asked.conversation.prompt_tokens >= LONG_PROMPT:
                chosen = self._with_samples(asked.conversation.prompt, able, chosen)
        if chosen is None:
            return False
        if home is not None:
            self.held[home].between_turns.discard(asked.conversation)
        self._hand(chosen, asked)
        return True

    def _with_samples(self, prompt: int, able: Sequence[int], fewest: int) -> int:
        """Return the replica of the prompt's samples before, or the one with the fewest requests."""
        before, replica = self._newest
        load = self.held[replica].load if before == prompt and replica in able else 0
        if not 0 < load < self.held[fewest].load + TOGETHER:
            replica = fewest
        self._newest = (prompt, replica)
        return replica

    @property
    def _able(self) -> list[int]:
        """Return the replicas that take a new request."""
        return [replica for replica in self.alive if self.held[replica].takes()]

    def _for_next_turn(self, home: int) -> int:
        """Return `home`, or a replica with so few conversations that computing a prefix there again pays, such as a new
        engine."""
        here = self.held[home].conversations
        if here <= _MOVED:
            return home
        conversations = {replica: self.held[replica].conversations for replica in self._able}
        fewest = min(conversations, key=lambda replica: (conversations[replica], replica), default=home)
        return fewest if here > 2 * conversations.get(fewest, here) + _MOVED else home

    def _hand(self, replica: int, asked: PendingRequest) -> None:
        self.held[replica].give(asked)
        self.taken_over, asked.recovered = self.taken_over + asked.recovered, 0

    def finish(self, replica: int, number: int, completion: Completion) -> PendingRequest | None:
        """Return the answered request; None if it was dropped."""
        held = self.held[replica]
        asked = held.finish(number)
        if asked is not None:
            asked.conversation.add_turn(asked.request, completion, replica)
            asked.conversation.turn_ended_s = self._clock()
            if asked.conversation.ended:
                self._end(held, asked.conversation)
            elif held.is_roomy or self._keeps_places:
                held.keep_place(asked.conversation)
        return asked

    def refuse(self, replica: int, number: int) -> PendingRequest | None:
        """Return the request that the engine rejects; None if it was dropped."""
        return self.held[replica].finish(number)

    def _end(self, held: ReplicaLoad, conversation: Conversation) -> None:
        """Give up the place of a conversation that has ended, and note its length."""
        held.between_turns.discard(conversation)
        held.admission.end(conversation.tokens)
        self._lengths.note(conversation.prompt, conversation.tokens - conversation.prompt_tokens)

    @property
    def waiting(self) -> int:
        """Tokens of lost replicas' responses that wait for another replica."""
        return sum(asked.recovered for asked in self._waiting)

    def lose(self, replica: int) -> None:
        """Requeue the requests of a dead replica."""
        self.alive.discard(replica)
        self._requeue(replica)

    def replace(self, replica: int) -> None:
        """Requeue the requests of a replica that a new engine has replaced, and give it its share of the others'."""
        self._requeue(replica)
        self.alive.add(replica)
        share = -(-sum(self.held[one].load for one in self.alive) // len(self.alive))
        for one in self.alive - {replica}:
            # The newest have the fewest tokens. Other conversations may move at their next turn.
            movable = [asked for asked in self.held[one].requests if asked.conversation.engine is None]
            for asked in nlargest(self.held[one].load - share, movable, key=lambda asked: asked.order):
                self.held[one].drop(asked)
                asked.requeue()
                self._hand(replica, asked)

    def _requeue(self, replica: int) -> None:
        for asked in self.held[replica].requests:
            asked.requeue()
            self._wait(asked)
        self.held[replica].clear()

    def drop(self, asked: PendingRequest) -> None:
        """Abort a request."""
        for waiting in (self._waiting, self._returning):
            if asked in waiting:
                waiting.remove(asked)
        for replica in self.alive:
            self.held[replica].drop(asked)

    def clear(self) -> None:
        self._waiting.clear()
        self._returning.clear()
        for held in self.held:
            held.clear()
            held.busy.runs(False)

    def unanswered(self) -> list[PendingRequest]:
        return [*self._waiting, *self._returning, *(asked for held in self.held for asked in held.requests)]

    def describe(self) -> str:
        loads = ", ".join(
            f"engine {replica} has {held.load} requests" if replica in self.alive else f"engine {replica} died"
            for replica, held in enumerate(self.held)
        )
        return f"{loads}; {len(self._waiting) + len(self._returning)} requests wait for an engine"
