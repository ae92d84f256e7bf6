"""Which replica has which request, and which requests wait for one."""

from bisect import insort

from nemo_rl_lite.generation.held_requests import Asked, HeldRequests, Stopwatch


class Assignment:
    """Gives each request to the replica with the fewest unfinished ones, and at most `capacity` to each."""

    def __init__(self, replicas: int, capacity: int):
        self._capacity = capacity
        self.alive = set(range(replicas))
        self.held = [HeldRequests() for _ in range(replicas)]
        self._waiting: list[Asked] = []
        self._idle = Stopwatch()

    @property
    def idle_s(self) -> float:
        """Seconds so far in which no replica had a request."""
        return self._idle.seconds

    @property
    def busy_s(self) -> float:
        """Seconds so far in which a replica had requests and was not paused, summed over the replicas."""
        return sum(held.busy.seconds for held in self.held)

    def time(self, is_paused: bool) -> None:
        """Note which replicas have requests from now on."""
        self._idle.runs(not any(self.held[replica].load for replica in self.alive))
        for replica, held in enumerate(self.held):
            held.busy.runs(not is_paused and replica in self.alive and held.load > 0)

    def add(self, asked: Asked) -> None:
        """Let a request wait."""
        insort(self._waiting, asked, key=lambda one: one.place)

    def assign(self) -> None:
        """Give waiting requests to replicas, in their order, as long as one has room."""
        while self._waiting and self.alive and self._give(self._waiting[0]):
            self._waiting.pop(0)

    def _give(self, asked: Asked) -> bool:
        loads = {replica: self.held[replica].load for replica in self.alive}
        least = min(loads, key=lambda replica: (loads[replica], replica))
        # An engine that knows the beginning of the prompt need not compute it again.
        chosen = asked.near if asked.near in loads and loads[asked.near] < self._capacity else least
        if loads[chosen] >= self._capacity:
            return False
        self.held[chosen].give(asked)
        return True

    def lose(self, replica: int) -> None:
        """Let the others do what a dead replica has not finished."""
        self.alive.discard(replica)
        self._requeue(replica)

    def replace(self, replica: int) -> None:
        """A new engine, which knows no request, is in the place of this one."""
        self._requeue(replica)
        self.alive.add(replica)

    def _requeue(self, replica: int) -> None:
        self._waiting = sorted([*self.held[replica].requests, *self._waiting], key=lambda asked: asked.place)
        self.held[replica].clear()

    def drop(self, asked: Asked) -> None:
        """Nobody waits for this answer any more."""
        if asked in self._waiting:
            self._waiting.remove(asked)
        for replica in self.alive:
            self.held[replica].drop(asked)

    def clear(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
        for held in self.held:
            held.clear()
            held.busy.runs(False)

    def unanswered(self) -> list[Asked]:
        """All requests, those that wait and those that replicas have."""
        return [*self._waiting, *(asked for held in self.held for asked in held.requests)]

    def describe(self) -> str:
        """Say how many requests each replica has, and how many wait."""
        loads = ", ".join(
            f"engine {replica} has {held.load} requests" if replica in self.alive else f"engine {replica} died"
            for replica, held in enumerate(self.held)
        )
        return f"{loads}; {len(self._waiting)} requests wait for an engine"
