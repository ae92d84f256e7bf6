"""Simulate 30 days of training under hardware failures, with the launcher's own budget of restarts.

Failures are those of Llama 3 (arXiv:2407.21783, table 5): 419 unexpected interruptions in 54 days on 16,384 GPUs. That
is one in 99 hours on 512 GPUs. A fault of a GPU passes and ends its process, or it stays. Then it raises an error, and
again at each start on its node. Spare nodes are free. Nothing fails during a restart.

A run that ends waits for a person, or stays ended. Goodput is the time of steps that count, over the whole time. The
seconds below are assumptions for a model with 70e9 parameters, except the launcher's own limits.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import record

from nemo_rl_lite.errors import WorkerError
from nemo_rl_lite.validation.compose import compose_config
from nemo_rl_lite.workers.budget import RestartBudget

# Interruptions of Llama 3: processes that end, faults of GPUs, lost nodes, and timeouts of collectives.
KINDS = {"process": 91, "gpu": 268, "node": 53, "hang": 7}
GPU_HOURS = 54 * 24 * 16_384 / sum(KINDS.values())
HOUR_S, DAYS, PERSON_S = 3_600.0, 30, 8 * 3_600.0
STEP_S, SAVE_EVERY, SAVE_S = 300.0, 10, 10.0
# Seconds until a lost process is noticed, of a start of all processes, and of one that keeps the engines.
NOTICE_S, START_S, KEEPING_S = 15.0, 240.0, 90.0
CLUSTER = compose_config().cluster


@dataclass(frozen=True)
class Way:
    """Reaction of the launcher to a failure."""

    counts_steps: bool = False
    """The budget is of each step, not of the whole run."""
    restarts_errors: bool = False
    """Restart after an error of a GPU, and if a restart fails."""
    avoids_nodes: bool = False
    keeps_engines: bool = False


WAYS = {
    "budget of the run": Way(),
    "budget of a step": Way(counts_steps=True),
    "and restart after errors": Way(counts_steps=True, restarts_errors=True),
    "and avoid nodes": Way(counts_steps=True, restarts_errors=True, avoids_nodes=True),
    "and keep engines (default)": Way(counts_steps=True, restarts_errors=True, avoids_nodes=True, keeps_engines=True),
}


class Month:
    """One run of `DAYS` days. Failures are equal for all ways with the same `seed`."""

    def __init__(self, way: Way, gpus: int, read_s: float, stays: bool, has_person: bool, seed: int):
        self._way, self._read_s, self._stays, self._has_person = way, read_s, stays, has_person
        self._random, self._mean_s = random.Random(seed), GPU_HOURS / gpus * HOUR_S
        self._now, self._step, self._furthest = 0.0, 0, 0
        self.ended = 0
        """Number of times that the run ended by itself."""
        self._budget = self._new_budget()

    def goodput(self) -> float:
        """Run for `DAYS` days; return the share of time in steps that count."""
        end = DAYS * 24 * HOUR_S
        while self._now < end:
            fails = min(self._now + self._random.expovariate(1 / self._mean_s), end)
            self._train(fails)
            if fails == end:
                break
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            if not self._restarts(kind):
                self.ended += 1
                if not self._has_person:
                    break
                self._now += PERSON_S + START_S + self._read_s
                self._budget = self._new_budget()
            self._step -= self._step % SAVE_EVERY
        return self._furthest * STEP_S / end

    def _train(self, until: float) -> None:
        """Take steps until a failure interrupts one."""
        while self._now < until:
            saves = (self._step + 1) % SAVE_EVERY == 0
            self._now += STEP_S + saves * SAVE_S
            self._step += self._now <= until
        self._now, self._furthest = until, max(self._furthest, self._step)

    def _restarts(self, kind: str) -> bool:
        """Restart after a failure; return False if the run ends."""
        stays = kind == "gpu" and self._stays
        error = WorkerError("policy rank 0", "train", kind, lost=not stays)
        self._now += CLUSTER.collective_timeout_s if kind == "hang" else NOTICE_S
        while error.lost or self._way.restarts_errors:
            try:
                self._budget.take(error)
            except WorkerError:
                return False
            keeps = self._way.keeps_engines and self._budget.taken == 1 and kind != "node"
            self._now += KEEPING_S if keeps else START_S
            if not stays or (self._way.avoids_nodes and not keeps):
                self._now += self._read_s
                return True
        return False

    def _new_budget(self) -> RestartBudget:
        # A constant step is a budget of the whole run.
        return RestartBudget(CLUSTER.max_restarts, lambda: self._step if self._way.counts_steps else 0)


def measure(gpus: int, read_s: float, months: int) -> Iterator[dict[str, Any]]:
    """Yield goodput, and how often a run ended, of each way with and without a person."""
    for stays, has_person, (name, way) in itertools.product((False, True), (False, True), WAYS.items()):
        who = f"a person after {PERSON_S / HOUR_S:g} h" if has_person else "unattended"
        setting = f"faults {'stay' if stays else 'pass'}, {who}: {name}"
        runs = [Month(way, gpus, read_s, stays, has_person, seed) for seed in range(months)]
        shares = [round(one.goodput(), 4) for one in runs]
        ends = statistics.mean(one.ended for one in runs)
        print(f"{setting}: {statistics.mean(shares):.3f}, ended {ends:.2f} times", flush=True)
        yield record.result("goodput", setting, "", shares)
        yield record.result("mean ends per run", setting, "", [ends])


def bars(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the target of the default, in its worst months."""
    shown = [one for one in results if one["name"] == "goodput" and "unattended: and keep engines" in one["config"]]
    return [record.bar(f"goodput, 5 % quantile, {one['config']}", _low(one), 0.95, True) for one in shown]


def _low(measured: dict[str, Any]) -> float:
    return sorted(measured["reps"])[len(measured["reps"]) // 20]


def write(gpus: int, read_s: float, months: int) -> None:
    results = list(measure(gpus, read_s, months))
    note = f"{months} months, {gpus} GPUs, a checkpoint is read in {read_s:g} s"
    record.write("month", results, bars(results), note, machine=False)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--months", type=int, default=100)
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--read-s", type=float, default=180.0)
    given = parser.parse_args(arguments)
    write(given.gpus, given.read_s, given.months)


def trial() -> None:
    write(512, 180.0, 2)


if __name__ == "__main__":
    record.start(main, trial)
