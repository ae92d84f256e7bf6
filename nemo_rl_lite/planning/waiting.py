"""Who waits for whom in a step on GPUs, and which division of the GPUs makes the step shortest: tables and JSON."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import all_gpus
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.models.shape import ModelShape
from nemo_rl_lite.planning.automatic import settle
from nemo_rl_lite.planning.budget import budget
from nemo_rl_lite.planning.gpus import speed_of
from nemo_rl_lite.planning.measured_run import MeasuredRun
from nemo_rl_lite.planning.phase_time import Lengths
from nemo_rl_lite.planning.splits import Refusal, Search, Split
from nemo_rl_lite.planning.step_time import StepTime, assumed_lengths, predict_step

HEADERS = ["engine GPUs", "policy GPUs", "generation", "logprob", "train", "refit", "in turn", "one step off"]
# Two predictions whose steps differ by less than this share cannot be told apart.
CLOSE = 0.1


@dataclass(frozen=True)
class Basis:
    """What predictions rest on: the lengths of sequences, factors for the phases, and where both come from."""

    lengths: Lengths
    factors: StepTime
    source: str

    @classmethod
    def assumed(cls, config: Config, mean: float | None = None) -> "Basis":
        """Without a run. `mean` is the mean length of responses, where it is known.

        Raises:
            ConfigError: `mean` is more than a response can have.
        """
        most = config.generation.max_new_tokens
        if mean is not None and not 0 < mean <= most:
            rule = f"is the mean length of responses, which have 1 to {most} tokens (generation.max_new_tokens)"
            raise ConfigError([Violation("--mean-length", f"{mean:g}", rule, f"--mean-length {most // 2 or 1}")])
        source = "assumed; --mean-length N or --from-run RUN knows better" if mean is None else "as --mean-length says"
        return cls(assumed_lengths(config, mean), StepTime(1, 1, 1, 1), source)

    @classmethod
    def measured(cls, config: Config, shape: ModelShape, gpu_bytes: int, run: MeasuredRun) -> "Basis":
        """From a run of the same model on the same kind of GPU: each phase is predicted as far off as it was there.

        Raises:
            ConfigError: the run trained another model.
        """
        names = [Path(one.policy.model_name).name for one in (run.config, config)]
        if names[0].lower() != names[1].lower():
            rule = f"trained {names[0]}, and the plan is for {names[1]}"
            raise ConfigError([Violation("--from-run", str(run.folder), rule, "a run of the same model")])
        trained = settle(run.config, shape, gpu_bytes).config
        factors = run.time.over(predict_step(trained, shape, gpu_bytes, run.lengths))
        return cls(run.lengths, factors, f"measured in {run.folder}")


@dataclass(frozen=True)
class Waiting:
    """A prediction of the configuration as it is, and of the other divisions of its GPUs."""

    basis: Basis
    rates_of: str
    """The GPU whose rates are assumed."""
    present: Split
    colocated: Split | Refusal
    apart: list[Split | Refusal]

    @property
    def shortest(self) -> Split:
        """The division with the shortest step, or the present one where that is not shorter by a share of `CLOSE`."""
        others = [one for one in (self.colocated, *self.apart) if isinstance(one, Split)]
        best = min([self.present, *others], key=lambda one: one.seconds)
        return best if best.seconds < (1 - CLOSE) * self.present.seconds else self.present

    @property
    def divisions(self) -> list[Split | Refusal]:
        """All of them by their GPUs for engines, the colocated one first."""
        others = [one for one in (self.colocated, *self.apart) if one.engine_gpus != self.present.engine_gpus]
        shared = self.colocated
        return sorted([self.present, *others], key=lambda one: (one is not shared, one.engine_gpus))

    @property
    def refused(self) -> dict[str, list[Refusal]]:
        """The divisions that are not possible, those together whose reasons begin with the same key."""
        found: dict[str, list[Refusal]] = {}
        for one in self.apart:
            if isinstance(one, Refusal):
                found.setdefault(one.reason.split()[0], []).append(one)
        return found


def predict_waiting(
    config: Config, overrides: Sequence[str], shape: ModelShape, gpu_bytes: int, basis: Basis
) -> Waiting:
    """Predict a step of `config`, composed from `overrides`, and of the other divisions of its GPUs of `gpu_bytes`."""

    def predict(one: Config) -> StepTime:
        one = settle(one, shape, gpu_bytes).config
        return predict_step(one, shape, gpu_bytes, basis.lengths).times(basis.factors)

    def fits(one: Config) -> bool:
        return budget(settle(one, shape, gpu_bytes).config, shape, gpu_bytes).fits_device

    search = Search(config, overrides, predict, fits)
    present = search.present()
    colocated = present if present.colocated else search.colocated()
    return Waiting(basis, speed_of(gpu_bytes)[0], present, colocated, list(search.apart()))


def rows(waiting: Waiting) -> list[list[str]]:
    """A row for each division, in seconds; `now` marks the configuration's."""
    table = []
    for one in waiting.divisions:
        shared, now = one is waiting.colocated, " (now)" if one is waiting.present else ""
        gpus = [f"{'all ' if shared else ''}{one.engine_gpus}{now}", "the same" if shared else str(one.policy_gpus)]
        if isinstance(one, Refusal):
            table.append([*gpus, *["-"] * 5, "refused"])
        else:
            phases = [*dataclasses.astuple(one.time), one.time.in_turn]
            table.append([*gpus, *map(_seconds, phases), "-" if shared else _seconds(one.time.overlapped)])
    return table


def lines(waiting: Waiting, config: Config) -> list[str]:
    """Sentences about the prediction: what it rests on, who waits, what is refused, and what to type."""
    lengths, present, shortest = waiting.basis.lengths, waiting.present, waiting.shortest
    said = [
        f"predicted at the rates of {waiting.rates_of} GPUs, for prompts of {lengths.prompt:.0f} tokens and responses "
        f"of {lengths.mean:.0f}, the longest of {lengths.longest:.0f} ({waiting.basis.source})",
        _who_waits(present),
    ]
    if config.environment.name is not None or config.agent.name is not None:
        said.append("waiting for the environment or the agent is not predicted; --from-run RUN knows it")
    for alike in waiting.refused.values():
        numbers = ", ".join(str(one.engine_gpus) for one in alike)
        first = f"; with {alike[0].engine_gpus}" if len(alike) > 1 else ""
        said.append(f"refused with {numbers} of the GPUs for engines{first}: {alike[0].reason}")
    if all_gpus(config) == 1:
        shares = "" if present.overlaps else ", so its policy and its engine take turns"
        said.append(f"one GPU cannot be divided{shares}")
    elif shortest is present:
        said.append(f"no other division makes the step shorter by {CLOSE:.0%} or more")
    else:
        apart = f"{shortest.engine_gpus} of the GPUs for engines that work while the policy trains"
        how = "colocated engines" if shortest.colocated else apart
        said.append(f"shortest step: {_seconds(shortest.seconds)} s with {how}; the overrides for it:")
        said.append(shlex.join(shortest.overrides))
        if shortest.instead_of:
            said.append(f"in place of: {shlex.join(shortest.instead_of)}")
    return said


def as_json(waiting: Waiting) -> dict[str, Any]:
    """The prediction in seconds and tokens."""
    return {
        "lengths": dataclasses.asdict(waiting.basis.lengths),
        "source": waiting.basis.source,
        "rates_of": waiting.rates_of,
        "present": _json(waiting.present),
        "colocated": _json(waiting.colocated),
        "apart": [_json(one) for one in waiting.apart],
        "shortest": _json(waiting.shortest),
    }


def _who_waits(split: Split) -> str:
    time, step = split.time, f"now: a step takes {_seconds(split.seconds)} s"
    if split.colocated and split.overlaps:
        return f"{step} at most: policy and engines work at the same time on the same GPUs, and are predicted in turn"
    if split.colocated:
        return f"{step}, in which engines and policy take turns on the same GPUs"
    if split.overlaps:
        late = time.generation - time.policy
        who = "the policy waits {} s for the engines" if late > 0 else "the engines wait {} s for the policy"
        return f"{step}, in which {who.format(_seconds(abs(late)))}"
    policy, engines = _seconds(time.generation), _seconds(time.policy)
    return f"{step}, in which the policy waits {policy} s for the engines and the engines {engines} s for the policy"


def _json(one: Split | Refusal) -> dict[str, Any]:
    if isinstance(one, Refusal):
        return dataclasses.asdict(one)
    return dataclasses.asdict(one) | {"in_turn": one.time.in_turn, "overlapped": one.time.overlapped}


def _seconds(seconds: float) -> str:
    """`0.43`, `4.3` or `43`."""
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"
