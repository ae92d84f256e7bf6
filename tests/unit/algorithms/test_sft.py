"""The loop with a policy that only takes notes."""

import dataclasses

import pytest
import torch

from nemo_rl_lite.algorithms.sft import SFT
from nemo_rl_lite.config.schema import SFTConfig
from nemo_rl_lite.data.examples import TrainingExamples
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.sinks import MetricsLog
from nemo_rl_lite.offload.mover import Move

CONFIG = SFTConfig(
    name="sft",
    seed=1,
    max_num_epochs=2,
    max_num_steps=None,
    val_period=2,
    val_at_start=True,
    val_at_end=True,
    max_val_samples=10,
)
BATCH = {
    "tokens": torch.ones(2, 4, dtype=torch.int64),
    "mask": torch.tensor([[0.0, 1, 1, 0], [0, 0, 0, 1]]),
    "lengths": torch.tensor([3, 4]),
}


class NotingPolicy:
    def __init__(self):
        self.calls = []

    def prepare_for_logprob(self):
        self.calls.append("logprob")

    def prepare_for_training(self):
        self.calls.append("training")

    def take_moves(self):
        return {"parameters/to_host": Move(8, 1.0, 0.5)}

    def logprobs(self, tokens_BT, lengths_B):
        return torch.full(tokens_BT.shape, -0.5)

    def train(self, batch, loss):
        self.calls.append("train")
        return {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "wd": 0.0}

    def take_memory(self):
        return {}


class Data(TrainingExamples):
    def __init__(self, steps_per_epoch):
        object.__setattr__(self, "of_epoch", steps_per_epoch)

    steps_per_epoch = property(lambda self: self.of_epoch)

    def batch(self, step):
        return BATCH


def sft(validation=BATCH, steps_per_epoch=3, **changes) -> SFT:
    config = dataclasses.replace(CONFIG, **changes)
    return SFT(config, NotingPolicy(), Data(steps_per_epoch), validation, MetricsLog([]), RunConsole(), devices=1)


@pytest.mark.parametrize(
    ("epochs", "steps", "of_epoch", "expected"),
    [(2, None, 3, 6), (None, 5, 3, 5), (2, 4, 3, 4), (1, 100, 3, 3), (1, 7, None, 7)],
)
def test_a_run_ends_at_its_first_limit(epochs, steps, of_epoch, expected):
    assert sft(max_num_epochs=epochs, max_num_steps=steps, steps_per_epoch=of_epoch).steps() == expected


def test_phases_alternate_and_metrics_have_nemo_rls_names():
    job = sft(max_num_steps=3)
    job.run()
    assert job.policy.calls == ["logprob", *["training", "train"] * 2, "logprob", "training", "train", "logprob"]
    assert job.metrics.series("validation/val_loss") == ([0, 2, 3], [0.5, 0.5, 0.5])
    assert job.metrics.series("train/global_valid_toks") == ([1, 2, 3], [3, 3, 3])
    assert job.metrics.series("train/total_num_tokens")[1] == [7, 7, 7]
    assert job.metrics.series("train/epoch")[1] == pytest.approx([1 / 3, 2 / 3, 1])
    expected = {"train/loss", "train/grad_norm", "train/lr", "train/global_valid_seqs", "performance/tokens_per_sec"}
    expected |= {"timing/train/total_step_time", "timing/train/policy_training", "timing/train/data_processing"}
    assert set().union(*job.metrics.history) >= expected


def test_without_held_out_chats_nothing_is_validated():
    job = sft(validation=None)
    job.run()
    assert "logprob" not in job.policy.calls and len(job.policy.calls) == 12
