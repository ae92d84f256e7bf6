"""The part of a step's report that is the same for every algorithm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_rl_lite.observability.console import ENGINES_IDLE, RunConsole
from nemo_rl_lite.observability.memory import with_rest
from nemo_rl_lite.observability.speed import PolicySpeed
from nemo_rl_lite.observability.timer import Timer
from nemo_rl_lite.observability.trackers import MetricsLog, under
from nemo_rl_lite.offload.mover import move_metrics
from nemo_rl_lite.policy.interface import Policy, Work


@dataclass(frozen=True)
class Report:
    """Logs a step to the metrics log and the terminal, with the metrics that come from the policy and the machines."""

    metrics: MetricsLog
    console: RunConsole
    policy: Policy
    devices: int
    """GPUs of the run, or its policy ranks on CPUs: what throughput is divided by."""
    speed: PolicySpeed
    system: Callable[[], dict[str, float]]
    """Metrics of the machines since the last call."""

    def step(
        self,
        step: int,
        total: int,
        samples: int,
        train: Mapping[str, float],
        seconds: Mapping[str, float],
        work: Work | None,
        shown: Mapping[str, float],
        others: Mapping[str, float] | None = None,
        memory: Mapping[str, float] | None = None,
    ) -> None:
        """Log step `step` of `total` on `samples` sequences of `total_num_tokens` tokens, and print a line with `shown`
        and how its first value has developed. `work`: what the policy computed; `others`: metrics with whole names;
        `memory`: of the engines."""
        tokens, whole = train["total_num_tokens"], seconds["total_step_time"]
        speed = {
            "samples_per_sec": samples / whole,
            "tokens_per_sec": tokens / whole,
            "policy_training_tokens_per_sec": tokens / seconds["policy_training"],
            "tokens_per_sec_per_gpu": tokens / whole / self.devices,
        }
        self.metrics.log(
            step,
            under("train", train)
            | under("timing/train", seconds)
            | under("timing/replicas", self.policy.take_waits())
            | under("performance", speed | self._utilization(work, seconds))
            | dict(others or {})
            | under("offload", move_metrics(self.policy.take_moves()))
            | under("memory", with_rest("generate", {**(memory or {}), **self.policy.take_memory()}))
            | under("ray", self.system()),
        )
        trend = self.metrics.series(f"train/{next(iter(shown))}")[1]
        self.console.step(step, total, shown, seconds, trend, (others or {}).get(ENGINES_IDLE))

    def _utilization(self, work: Work | None, seconds: Mapping[str, float]) -> dict[str, float]:
        if work is None:
            return {}
        rates = self.speed.training(work.training, seconds["policy_training"])
        if work.scoring:
            rates |= self.speed.logprobs(work.scoring, seconds["policy_and_reference_logprobs"])
        return rates

    def validation(self, step: int, values: Mapping[str, float], timer: Timer, said: str) -> None:
        """Log a validation after step `step`, and print `said` about it."""
        self.metrics.log(step, under("validation", values) | under("timing/validation", timer.take()))
        self.console.say(f"validation after step {step}: {said}")
