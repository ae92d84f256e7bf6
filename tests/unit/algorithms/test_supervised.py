"""The loop with a policy that only records its calls."""

import dataclasses
import time
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from nemo_rl_lite.algorithms.loop import Report, Steps, total_steps
from nemo_rl_lite.algorithms.supervised import Supervised
from nemo_rl_lite.checkpoint.store import Checkpoints, CheckpointStore, Retention
from nemo_rl_lite.data.examples import TrainingExamples
from nemo_rl_lite.losses.batch import Batch, TokenRow, TokenRows
from nemo_rl_lite.losses.supervised import SFTLoss
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.timer import PolicySpeed
from nemo_rl_lite.observability.trackers import MetricsLog
from nemo_rl_lite.offload.mover import Move
from nemo_rl_lite.policy.interface import BatchRef, Work
from nemo_rl_lite.system.stopping import Stopping
from nemo_rl_lite.validation.compose import compose_config

SFT = compose_config(["algorithm=sft"]).algorithm
CONFIG = dataclasses.replace(SFT, max_num_epochs=2, max_num_steps=None, val_period=2)
ROWS = [TokenRow([1, 1, 1], [False, True, True]), TokenRow([1, 1, 1, 1], [False, False, False, True])]


class RecordingPolicy:
    """Gives every token the logprob -0.5."""

    def __init__(self):
        self.calls, self.logprob = [], lambda: -0.5

    def prepare_for_logprob(self):
        self.calls.append("logprob")

    def prepare_for_training(self):
        self.calls.append("training")

    def pop_moves(self):
        return {"parameters/to_host": Move(8, 1.0, 0.5)}

    def take_waits(self):
        return {}

    def put_batch(self, rows, name="train"):
        self.calls.append(f"hold {name}")
        return BatchRef(name, TokenRows.of(rows), [list(range(len(rows)))])

    def score(self, batch, which):
        self.calls.append(f"score {batch.name} {'+'.join(which)}")

    def work(self, batch, which):
        return Work(4e12 * len(which), 8e12)

    def evaluate(self, batch, loss):
        rows = Batch.padded(batch.rows)
        _, metrics = loss(torch.full(rows.tokens.shape, self.logprob()), rows, loss.counts(batch.rows))
        return {name: value.item() for name, value in metrics.items()}

    def train(self, batch, loss):
        self.calls.append("train")
        return {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "wd": 0.0}

    def pop_memory(self):
        return {}


class Data(TrainingExamples):
    def __init__(self, steps_per_epoch):
        object.__setattr__(self, "of_epoch", steps_per_epoch)

    steps_per_epoch = property(lambda self: self.of_epoch)

    def rows(self, step):
        return ROWS


def sft(validation=ROWS, steps_per_epoch=3, **changes) -> Supervised:
    policy, metrics = RecordingPolicy(), MetricsLog([])
    store = CheckpointStore(Path("nowhere"), Retention(1, 0, None, True))
    checkpoints = Checkpoints(store, policy, 0, True, {}, print)
    return Supervised(
        config=dataclasses.replace(CONFIG, **changes),
        loss=SFTLoss(),
        with_reference=False,
        policy=policy,
        training=Data(steps_per_epoch),
        validation=validation,
        steps=Steps(0, checkpoints, Stopping(None, time.monotonic), metrics, 3, lambda step: nullcontext()),
        report=Report(metrics, RunConsole(), policy, 1, PolicySpeed(2, 1e15), dict),
    )


@pytest.mark.parametrize(
    ("epochs", "steps", "of_epoch", "expected"),
    [
        (2, None, 3, 6),
        (None, 5, 3, 5),
        (2, 4, 3, 4),
        (1, 100, 3, 3),
        (1, 7, None, 7),
        # Prompts of a rollout may be of two epochs.
        (3, None, Fraction(10, 4), 7),
        (1, None, Fraction(3, 64), 1),
    ],
)
def test_a_run_ends_at_its_first_limit(epochs, steps, of_epoch, expected):
    config = dataclasses.replace(CONFIG, max_num_epochs=epochs, max_num_steps=steps)
    assert total_steps(config, of_epoch) == expected


def test_phases_alternate_and_metrics_have_nemo_rls_names():
    job = sft(max_num_steps=3)
    job.run()
    step = ["hold train", "training", "train"]
    assert job.policy.calls == ["logprob", "hold validation", *step * 2, "logprob", *step, "logprob"]
    assert job.report.metrics.series("validation/val_loss") == ([0, 2, 3], [0.5, 0.5, 0.5])
    assert job.report.metrics.series("train/global_valid_toks") == ([1, 2, 3], [3, 3, 3])
    assert job.report.metrics.series("train/total_num_tokens")[1] == [7, 7, 7]
    assert job.report.metrics.series("train/epoch")[1] == pytest.approx([1 / 3, 2 / 3, 1])
    expected = {"train/loss", "train/grad_norm", "train/lr", "train/global_valid_seqs", "performance/tokens_per_sec"}
    expected |= {"timing/train/total_step_time", "timing/train/policy_training", "timing/train/data_processing"}
    assert set().union(*job.report.metrics.history) >= expected


@pytest.mark.parametrize(("patience", "stopped_at"), [(1, 4), (2, 6), (None, 12)])
def test_a_run_stops_when_validations_no_longer_improve(patience, stopped_at):
    """Validations after steps 0, 2, 4, ...: the second is better, those after it are not."""
    losses = iter([-0.9, -0.5, -0.5, -0.6, *[-0.7] * 9])
    job = sft(max_num_steps=12, max_num_epochs=None, early_stop_patience=patience)
    job.policy.logprob = lambda: next(losses)
    job.run()
    assert job.report.metrics.series("train/loss")[0][-1] == stopped_at


def test_the_reference_scores_each_batch_before_training_and_held_out_ones_once():
    job = sft(max_num_steps=3)
    job.with_reference = True
    job.run()
    first = ["logprob", "hold validation", "score validation reference"]
    step = ["hold train", "logprob", "score train reference", "training", "train"]
    assert job.policy.calls == [*first, *step * 2, "logprob", *step, "logprob"]
    of_phases = {"train": ("policy_training", 8), "policy_and_reference_logprobs": ("policy_and_reference_logprobs", 4)}
    for phase, (timer, tera) in of_phases.items():
        (_, rates), (_, seconds) = map(
            job.report.metrics.series, (f"performance/{phase}_flops_per_gpu", f"timing/train/{timer}")
        )
        assert rates == pytest.approx([tera / 2 / own for own in seconds])
        _, shares = job.report.metrics.series(f"performance/{phase}_fp_utilization")
        assert shares == pytest.approx([rate / 1000 for rate in rates])
