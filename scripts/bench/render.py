"""Render docs/benchmarks/*.json into docs/benchmarks/README.md and the tables of the pages that `TABLES` names, and
the picture and table of what the algorithms learned into README.md.

With --check it writes nothing and fails where a page is stale.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import learning_figure
import record

PAGE = record.FOLDER / "README.md"
README = record.ROOT / "README.md"
QUICKSTART = record.ROOT / "docs" / "quickstart.md"
GPUS = record.ROOT / "docs" / "gpus.md"
MEMORY = record.ROOT / "docs" / "memory.md"
REFIT = record.ROOT / "docs" / "refit.md"
SUPERVISED = record.ROOT / "docs" / "supervised.md"
RELIABILITY = record.ROOT / "docs" / "reliability.md"
ROLLOUTS = record.ROOT / "docs" / "rollouts.md"
EVALUATION = record.ROOT / "docs" / "evaluation.md"
ASYNC = record.ROOT / "docs" / "async.md"
PERFORMANCE = record.ROOT / "docs" / "performance.md"
PHASES = ("generation", "logprob", "train", "refit", "whole step")
WAYS = ("offline", "stepped", "stepped without logprobs", "stepped without seeds", "stepped, own process", "async")


@dataclass(frozen=True)
class Table:
    """A table of a page: the record it shows, and which of the record's rows (all where empty). With `columns` each row
    is a setting and shows the medians of these quantities."""

    page: Path
    bench: str
    hardware: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    optional: bool = False
    """Without the record there is no table, and that is no error."""


MEASURED = ("generation-0", "policy-0", "launcher")
KILLED = (*MEASURED, "gcs_server", "raylet", "process group")
KILLED_AHEAD = ("generation-0", "generation-1", *KILLED[1:])
TRAINING = ("train", "policy_peak_bytes/train", "device_bytes/train")
LEARNED = (
    "held-out loss before",
    "held-out loss after",
    "accuracy on 1,319 test questions, greedy",
    "held-out preference accuracy before",
    "held-out preference accuracy after",
)
STAGES = ("seconds", "pack", "transfer", "load", "weights of a refit")
OF_EXPERTS = (
    *("tokens a second, whole step", "generation", "logprob", "train", "MFU of training", "refit"),
    *("bytes of a refit", "mean logprob difference", "policy's peak, train"),
    "policy's peak, train, planned over measured",
)
MISMATCH = (
    *("mean absolute logprob difference", "largest logprob difference"),
    *("gen_kl_error", "token_mult_prob_error"),
)
PRECISION = (
    *("mean absolute logprob difference", "gen_kl_error", "token_mult_prob_error", "generated tokens a second"),
    *("generation", "refit", "engine's weights", "whole step"),
)
# The key is the mark around the table.
ABLATION = ("whole step", "generation", "logprob", "train", "policy's memory in training", "command to first step")
SHARES = ("MFU of training", "bandwidth share of decoding")
WITH_SHARES = (*ABLATION, *SHARES)
# Of NeMo-RL's published step.
PUBLISHED = ("whole step", "generation", "logprob", "train", "refit", "tokens a second and GPU")
PUBLISHED_MEASURED = (*PUBLISHED, *SHARES, "policy's peak in training", "GPU in use while generating")
LONGEST = (
    *("step", "step, predicted", "tokens a second and GPU", "policy's peak", "policy's peak, predicted"),
    *("GPU in use", "GPU in use, predicted"),
)
LONGEST_CACHED = (*LONGEST[:-2], "reserved by torch", *LONGEST[-2:])
SEQUENCE = (
    *("tokens a second", "MFU", "memory at its peak"),
    *("traced step: a kernel runs", "traced step: no kernel runs"),
)
OVERLAPPED = (
    *("logprob preparation", "logprob", "training preparation", "train", "whole step"),
    *("optimizer_states/to_host_exposed_s", "optimizer_states/to_device_exposed_s"),
)
ADAPTERS = (
    *("whole step", "generation", "train", "refit", "refit, transfer and load", "bytes of a refit"),
    *("policy's memory in training", "GPU in use while generating"),
)
AGREEMENT = (
    *("nrl-lite evaluate, its rule", "lm-evaluation-harness, its rule", "difference of the accuracies"),
    *("its 95 % interval, low", "its 95 % interval, high", "same greedy response"),
)
BUSY = ("seconds", "GPU busy for generation-0", "GPU busy for policy-0")
TABLES = {
    "quickstart table": Table(
        QUICKSTART,
        "quickstart",
        "cpu-2cores",
        (
            "held-out accuracy before",
            "held-out accuracy after",
            "whole job, warm start included",
            "GRPO step (median of a run)",
        ),
    ),
    "gpu table": Table(
        GPUS,
        "grpo-chain-sum",
        "1x-h200",
        (
            "mean reward of the last ten steps",
            "held-out accuracy before",
            "held-out accuracy after",
            "whole step (median of a run)",
        ),
    ),
    "copies table": Table(MEMORY, "offload-copies", "1x-h100"),
    "overlapped moves table": Table(
        MEMORY,
        "offload-prepare",
        "1x-h100",
        columns=OVERLAPPED,
    ),
    "pieces table": Table(MEMORY, "offload-pieces", "1x-h100", columns=OVERLAPPED),
    "queued pieces table": Table(MEMORY, "offload-pieces-queued", "1x-h100", columns=OVERLAPPED),
    "presets table": Table(
        MEMORY,
        "offload-presets",
        "1x-h100",
        columns=(
            "whole step",
            "GPU in use while generating",
            "policy's peak in logprob",
            "policy's peak in training",
            "moves, all copies of a step",
            "moves, waited for in a step",
        ),
    ),
    "cpu optimizer table": Table(MEMORY, "offload-cpu-optimizer", "1x-h100", columns=TRAINING),
    "activations table": Table(MEMORY, "offload-activations", "1x-h100", columns=TRAINING),
    "apart table": Table(
        REFIT, "refit-apart-qwen3-8b", "2x-h200", ("whole refit", "transfer alone", "repeated raw broadcast")
    ),
    "shared table": Table(REFIT, "refit-shared-qwen3-8b", "2x-h200", ("whole refit",)),
    "export table": Table(REFIT, "refit-export-qwen3-8b", "2x-h200", ("export",)),
    "experts refit table": Table(REFIT, "refit-shared-qwen3-moe-1.5b", "1x-h200", ("whole refit",)),
    "layouts table": Table(REFIT, "refit-layouts", "2x-h200", columns=STAGES),
    "layouts on four table": Table(REFIT, "refit-layouts", "4x-h200", columns=STAGES),
    "verified on one table": Table(REFIT, "refit-verified", "1x-h200"),
    "verified on two table": Table(REFIT, "refit-verified", "2x-h200"),
    "cost table": Table(
        REFIT,
        "refit-cost-predicted",
        "cpu-2cores",
        columns=(
            "weights",
            "tensors",
            "megatron-bridge's export",
            "broadcast inside a host",
            "broadcast between hosts",
            "shard to shard between hosts",
        ),
    ),
    "supervised table": Table(SUPERVISED, "supervised-gsm8k", "1x-h100", LEARNED),
    "LoRA refit table": Table(SUPERVISED, "lora-refit-large", "1x-h100", columns=ADAPTERS),
    "LoRA copies table": Table(SUPERVISED, "lora-copies-large", "1x-h100", columns=ADAPTERS),
    "SFT then GRPO table": Table(SUPERVISED, "learning-gsm8k", "1x-h100", optional=True),
    "large throughput table": Table(SUPERVISED, "sft-throughput-qwen3-1.7b", "1x-h100"),
    "throughput table": Table(SUPERVISED, "sft-throughput-smollm2-135m-instruct", "1x-h100"),
    "soak table": Table(
        RELIABILITY,
        "soak",
        "cpu-2cores",
        (
            *(f"from a killed {who} to the next step's end" for who in KILLED),
            *("kills", "steps taken again", "whole run", "step"),
            *(f"growth of {who} from step 150 on" for who in MEASURED),
        ),
    ),
    "async soak table": Table(
        ASYNC,
        "async-soak",
        "cpu-2cores",
        (
            *(f"from a killed {who} to the next step's end" for who in KILLED_AHEAD),
            *("kills", "steps taken again", "whole run", "largest age of a step's tokens"),
        ),
    ),
    "engine paths table": Table(ROLLOUTS, "rollouts-engine-paths", "1x-h100", WAYS),
    "engine settings table": Table(ROLLOUTS, "engine-settings", "1x-h100"),
    "compiled Triton table": Table(ROLLOUTS, "engine-settings-compiled-triton", "1x-h100"),
    "rate table": Table(ROLLOUTS, "rollouts-rate", "1x-h100", ("generation, before", "generation, now")),
    "balance table": Table(ROLLOUTS, "rollouts-balance", "cpu-2cores"),
    "linear scores table": Table(PERFORMANCE, "speed-linear-scores", "1x-h100"),
    "ablation table": Table(PERFORMANCE, "speed-ablation-large", "1x-h100", columns=ABLATION),
    "large auto table": Table(PERFORMANCE, "speed-ablation-large-auto", "1x-h100", columns=ABLATION),
    "small auto table": Table(PERFORMANCE, "speed-ablation-small-auto", "1x-h100", columns=ABLATION),
    "packs table": Table(PERFORMANCE, "speed-ablation-large-packs", "1x-h100", columns=ABLATION),
    "small ablation table": Table(PERFORMANCE, "speed-ablation-small", "1x-h100", columns=ABLATION),
    "large scheduler table": Table(PERFORMANCE, "speed-ablation-large-scheduler", "1x-h100", columns=WITH_SHARES),
    "large kept table": Table(PERFORMANCE, "speed-ablation-large-kept", "1x-h100", columns=WITH_SHARES),
    "small graphs table": Table(PERFORMANCE, "speed-ablation-small-graphs", "1x-h100", columns=WITH_SHARES),
    "large over TRL table": Table(PERFORMANCE, "speed-over-trl-large", "1x-h100"),
    "small start table": Table(PERFORMANCE, "speed-ablation-small-start", "1x-h100", columns=WITH_SHARES),
    "small over TRL table": Table(PERFORMANCE, "speed-over-trl-small", "1x-h100"),
    "busy table": Table(PERFORMANCE, "busy-by-phase-small", "1x-h100", columns=BUSY),
    "busy with graphs table": Table(PERFORMANCE, "busy-by-phase-small-graphs", "1x-h100", columns=BUSY),
    "scheduler table": Table(PERFORMANCE, "speed-engine-scheduler", "cpu-2cores"),
    "context table": Table(PERFORMANCE, "context-rate-qwen3-0.6b", "1x-h100"),
    "published simulated table": Table(
        PERFORMANCE,
        "published-row-simulated",
        "cpu-2cores",
        columns=(
            *PUBLISHED,
            "of it with a quarter of the responses or fewer",
            "engines wait",
            "stages idle",
            "replicas wait",
            "of it exchanged between replicas",
        ),
    ),
    "published predicted table": Table(
        PERFORMANCE, "published-row-predicted", "cpu-2cores", columns=(*PUBLISHED, "fullest GPU")
    ),
    "published measured table": Table(PERFORMANCE, "published-row-2-512", "2x-h100", columns=PUBLISHED_MEASURED),
    "published alone table": Table(PERFORMANCE, "published-row-1-512", "1x-h100", columns=PUBLISHED_MEASURED),
    "published apart table": Table(
        PERFORMANCE, "published-row-2-one-step-off-512", "2x-h100", columns=PUBLISHED_MEASURED
    ),
    "idle table": Table(GPUS, "dp-idle", "2x-h100"),
    "shared sequence table": Table(GPUS, "context-rate-qwen3-1.7b-context-2", "2x-h100", columns=SEQUENCE),
    "host order table": Table(
        GPUS, "context-rate-qwen3-1.7b-context-2-host-order", "2x-h100", columns=("tokens a second", "MFU")
    ),
    "longest table": Table(GPUS, "context-longest-qwen3-1.7b", "1x-h100", columns=LONGEST),
    "longest shared table": Table(GPUS, "context-longest-qwen3-1.7b-context-2", "2x-h100", columns=LONGEST),
    "longest 8 B table": Table(GPUS, "context-longest-qwen3-8b", "1x-h100", columns=LONGEST_CACHED),
    "longest 8 B shared table": Table(GPUS, "context-longest-qwen3-8b-context-2", "2x-h100", columns=LONGEST_CACHED),
    "replay table": Table(
        GPUS,
        "experts-router-replay-qwen3-moe-1.5b",
        "1x-h100",
        columns=(*MISMATCH, "generation", "logprob", "train", "whole step"),
    ),
    "no choice table": Table(GPUS, "experts-router-replay-qwen3-moe-no-choice", "1x-h200", columns=MISMATCH),
    "experts rate table": Table(GPUS, "experts-rate", "2x-h100", columns=OF_EXPERTS),
    "experts engine table": Table(GPUS, "experts-rate-engine", "2x-h100", columns=OF_EXPERTS),
    "trained model's precision table": Table(
        ROLLOUTS, "engine-precision-smollm2-135m-instruct", "1x-h100", columns=PRECISION
    ),
    "random model's precision table": Table(ROLLOUTS, "engine-precision-qwen3-1.7b", "1x-h100", columns=PRECISION),
    "shares table": Table(GPUS, "speed-balance", "cpu-2cores"),
    "dynamic sampling table": Table(ROLLOUTS, "rollouts-dynamic-sampling", "cpu-2cores"),
    "oversample table": Table(
        ROLLOUTS, "rollouts-oversample", "cpu-2cores", columns=("a rollout", "prompts begun for each looked at")
    ),
    "plan time table": Table(
        ASYNC,
        "plan-time-against-measured",
        "cpu-2cores",
        tuple(f"{phase}: predicted over measured" for phase in PHASES),
    ),
    "async rate table, two GPUs": Table(ASYNC, "async-rate", "2x-h200"),
    "async rate table, two H100s": Table(ASYNC, "async-rate", "2x-h100"),
    "async rate table, two GPUs colocated": Table(ASYNC, "async-rate-colocated", "2x-h200"),
    "async rate table": Table(
        ASYNC,
        "async-rate",
        "1x-h100",
        (
            *("generated tokens a second, whole step", "whole step", "policy waits for a rollout", "logprob", "train"),
            *("refit", "engines idle", "mean age of a token"),
        ),
    ),
    "async learning table": Table(ASYNC, "async-learning", "1x-h100"),
    "async learning table, one step off": Table(ASYNC, "async-learning-one-step-off", "1x-h100"),
    "agreement table": Table(EVALUATION, "evaluation-agreement", "cpu-2cores", columns=AGREEMENT),
    "tools table": Table(ROLLOUTS, "rollouts-tools", "cpu-2cores"),
    "largest table": Table(
        MEMORY,
        "largest-model-predicted",
        "cpu-2cores",
        columns=(
            "largest model, predicted",
            "its layers",
            "largest gpu_memory_utilization with 24 layers",
        ),
    ),
}


def main() -> None:
    records = [json.loads(path.read_text()) for path in sorted(record.FOLDER.glob("*.json"))]
    texts = pages(records)
    stale = [path for path, text in texts.items() if path.read_text() != text]
    stale += [learning_figure.PICTURE] if learning_figure.is_stale(records) else []
    if "--check" in sys.argv:
        if stale:
            sys.exit(f"out of date: {', '.join(path.name for path in stale)}; run python scripts/bench/render.py")
        return
    for path, text in texts.items():
        path.write_text(text)
    if learning_figure.PICTURE in stale:
        learning_figure.draw(records)


def pages(records: list[dict[str, Any]]) -> dict[Path, str]:
    """Return each page with its rendered text."""
    head = [
        "# Benchmarks",
        "",
        "Rendered by `python scripts/bench/render.py` from the JSON files in this folder, which hold all repetitions.",
        "",
    ]
    texts = {path: path.read_text() for path in dict.fromkeys(table.page for table in TABLES.values())}
    for mark, table in TABLES.items():
        before, rest = texts[table.page].split(f"<!-- {mark} -->\n")
        lines = _table_lines(table, records)
        after = rest.split(f"<!-- /{mark} -->")[1]
        texts[table.page] = "\n".join([f"{before}<!-- {mark} -->", *lines, f"<!-- /{mark} -->{after}"])
    before, rest = README.read_text().split("<!-- learning -->\n")
    learned = "".join(f"{line}\n" for line in learning_figure.table(records, "docs/"))
    texts[README] = f"{before}<!-- learning -->\n{learned}<!-- /learning -->{rest.split('<!-- /learning -->')[1]}"
    return {PAGE: "\n".join([*head, *(line for one in records for line in section(one))])} | texts


def _table_lines(table: Table, records: list[dict[str, Any]]) -> list[str]:
    found = [one for one in records if (one["bench"], one["hardware"]["name"]) == (table.bench, table.hardware)]
    if table.optional and not found:
        return []
    (one,) = found
    return settings_table(one, table.columns) if table.columns else results_table(one, table.rows)


def section(one: dict[str, Any]) -> list[str]:
    """Render one record: where, with what, what was measured, which targets were met."""
    hardware = one["hardware"]
    note = [one["note"], ""] if "note" in one else []
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    machine = f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB"
    if "gpus" in hardware:
        machine = f"{len(hardware['gpus'])} x {hardware['gpus'][0]['name']}; {machine}"
    commit = one["commit"].removesuffix("-dirty")[:9] + ("-dirty" if one["commit"].endswith("-dirty") else "")
    return [
        f"## {one['bench']} on {hardware['name']}",
        "",
        f"{machine}; {one['date'][:10]}, commit `{commit}`; `{one['command']}`; {versions}.",
        "",
        *note,
        *results_table(one),
        "",
        *bars_table(one),
    ]


def bars_table(one: dict[str, Any]) -> list[str]:
    """Render the targets, a row each; nothing where there are none."""
    if not one["bars"]:
        return []
    rows = (f"| {b['name']} | {b['target']} | {b['value']:.3g} | {'yes' if b['met'] else 'no'} |" for b in one["bars"])
    return ["| target | wanted | measured | met |", "|---|---:|---:|---|", *rows, ""]


def results_table(one: dict[str, Any], names: Sequence[str] = ()) -> list[str]:
    """Render a row for each quantity and setting, only those in `names` where given. A single run has no median."""
    rows = [row for row in one["results"] if not names or row["name"] in names]
    several = len({row["config"] for row in one["results"]}) > 1
    setting, line = (" setting |", "---|") if several else ("", "")
    repeated = any(len(row["reps"]) > 1 for row in rows)
    columns, lines = ("median | least | most", "---:|---:|---:") if repeated else ("value", "---:")
    table = [
        f"| measured |{setting} {columns} | unit |{' runs |' * repeated}",
        f"|---|{line}{lines}|---|{'---:|' * repeated}",
    ]
    for row in rows:
        reps = row["reps"]
        ends = (f"{min(reps):.3g}", f"{max(reps):.3g}") if len(reps) > 1 else ("", "")
        numbers = " | ".join([f"{row['median']:.3g}", *(ends if repeated else ())])
        which = f" {row['config']} |" if several else ""
        table.append(f"| {row['name']} |{which} {numbers} | {row['unit']} |{f' {len(reps)} |' if repeated else ''}")
    return table


def settings_table(one: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Render a row for each setting, with the medians of the quantities `names`."""
    units = {row["name"]: row["unit"] for row in one["results"]}
    medians = {(row["config"], row["name"]): row["median"] for row in one["results"]}
    head = " | ".join(f"{name}, {units[name]}" if units[name] else name for name in names)
    lines = [f"| setting | {head} |", f"|---|{'---:|' * len(names)}"]
    for setting in dict.fromkeys(config for config, _ in medians):
        cells = (f"{medians[setting, name]:.3g}" if (setting, name) in medians else "" for name in names)
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
