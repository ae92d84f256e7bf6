"""Collect results, times and curves of the SFT, DPO and LoRA runs on GSM8K that gpu_run.py kept."""

import matplotlib.pyplot as plt
import record
from series import Run, typical, values

PICTURE = record.ROOT / "docs" / "images" / "supervised-gsm8k.png"
SFT = {"sft-gsm8k-epoch": "SFT, 1 epoch", "sft-gsm8k-lora": "SFT with LoRA, 1 epoch"}
DPO = "dpo-gsm8k"
ACCURACY = {"gsm8k-accuracy-base": "before", "gsm8k-accuracy-sft": "after SFT, 1 epoch"}
NAMES = (*SFT, DPO, *ACCURACY)


def two_epochs(runs: list[Run]) -> tuple[list, list]:
    return [
        *_training(runs, "2 epochs of 7,466 chats", "step of 64 chats"),
        _whole(runs, "2 epochs of 7,466 chats"),
    ], []


def one_epoch_and_preferences(runs: list[Run]) -> tuple[list, list]:
    by_name = {run["name"]: run for run in runs}
    results = []
    for name, setting in SFT.items():
        own = [by_name[name]]
        results += [*_training(own, setting, "step of 64 chats"), _whole(own, setting)]
    for name, setting in ACCURACY.items():
        accuracy = values(by_name[name], "validation/accuracy")[:1]
        results.append(record.result("accuracy on 1,319 test questions, greedy", setting, "share", accuracy))
    preferences, setting = by_name[DPO], "DPO after SFT, 2 epochs of pairs"
    accuracies = values(preferences, "validation/accuracy")
    results.append(record.result("held-out preference accuracy before", setting, "share", accuracies[:1]))
    results.append(record.result("held-out preference accuracy after", setting, "share", accuracies[-1:]))
    margins = values(preferences, "validation/rewards_margin_mean")
    results.append(record.result("held-out reward margin after", setting, "nats", margins[-1:]))
    results += [*_training([preferences], setting, "step of 64 pairs"), _whole([preferences], setting)]
    return results, [
        record.bar("held-out preference accuracy before", accuracies[0], 0.5, at_least=True),
        record.bar("held-out preference accuracy after", accuracies[-1], 0.6, at_least=True),
    ]


def draw(runs: list[Run]) -> None:
    """Draw the held-out loss of SFT and the held-out accuracy of DPO over optimizer steps."""
    by_name = {run["name"]: run for run in runs}
    figure, (losses, accuracies) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, label in SFT.items():
        losses.plot(*zip(*by_name[name]["series"]["validation/val_loss"], strict=True), marker=".", label=label)
    losses.set(xlabel="optimizer step", ylabel="nats a token", title="held-out loss, GSM8K test solutions")
    losses.legend()
    accuracies.plot(*zip(*by_name[DPO]["series"]["validation/accuracy"], strict=True), marker=".", color="tab:green")
    accuracies.set(xlabel="optimizer step", ylabel="share", ylim=(0.45, 0.75), title="DPO: accuracy on held-out pairs")
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=130)


def _training(runs: list[Run], setting: str, step: str) -> list[dict]:
    losses = [values(run, "validation/val_loss") for run in runs]
    return [
        record.result("held-out loss before", setting, "nats", [one[0] for one in losses]),
        record.result("held-out loss after", setting, "nats", [one[-1] for one in losses]),
        record.result(step, setting, "s", typical(runs, "timing/train/total_step_time")),
        record.result("tokens a second and GPU", setting, "1/s", typical(runs, "performance/tokens_per_sec_per_gpu")),
    ]


def _whole(runs: list[Run], setting: str) -> dict:
    return record.result("whole job", setting, "s", [run["seconds"] for run in runs])
