"""Render docs/benchmarks/*.json into the tables of pages that `TABLES` names, and into the site's page of each record.

render.py             writes the tables and pictures
render.py --check     writes nothing, and fails where a table is stale
render.py --site      writes docs/benchmarks/NAME.md for each record, before `zensical build`; git ignores them
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import learning_figure
import record

DOCS = record.ROOT / "docs"
LEARNING = DOCS / "analysis" / "learning.md"
LIST = record.FOLDER / "records.md"


@dataclass(frozen=True)
class Table:
    """A table of a page: its record, and which of the record's rows (all where empty), by quantity and by setting. With
    `columns` each row is a setting and shows the medians of these quantities."""

    page: str
    record: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


KILLED = ("generation-0", "policy-0", "launcher", "gcs_server", "raylet", "process group")
PUBLISHED = (
    *("step time", "generation", "logprob", "train", "refit", "throughput per GPU"),
    *("policy's peak in training", "GPU in use while generating"),
)
ROWS = tuple(
    f"{row}: {what}"
    for row in ("Llama-3.1-8B, 8 GPUs", "Qwen3-30B-A3B, 32 GPUs", "Qwen3-235B-A22B, 128 GPUs", "DeepSeek-V3, 256 GPUs")
    for what in ("published by NeMo-RL", "predicted, NeMo-RL's sizes", "predicted, `auto`")
)
LONGEST = (
    *("step time", "step time, predicted", "throughput per GPU", "policy's peak", "policy's peak, predicted"),
    *("GPU in use", "GPU in use, predicted"),
)
TRAINING = ("step time", "train", "MFU of training", "policy's memory in training", "loss")
# Names of settings in records, and in tables.
SHOWN = {"the launcher's": "default"}
# The key is the mark around the table.
TABLES = {
    "quickstart table": Table(
        "quickstart",
        "quickstart-cpu-2cores",
        (
            *("held-out accuracy before", "held-out accuracy after", "end to end, with the warm-up"),
            "GRPO step (median of a run)",
        ),
    ),
    "tutorial table": Table(
        "tutorial",
        "tutorial-1x-h100",
        (
            *("dry run", "training", "evaluation", "step time"),
            *("reward of the first steps", "reward of the last steps"),
            *("held-out accuracy at the start", "held-out accuracy at the end", "peak memory, policy-0"),
        ),
    ),
    "export memory table": Table(
        "export", "export-memory-cpu-2cores", ("weights", "peak resident memory", "peak above that of few layers")
    ),
    "why table": Table("why", "why-cpu-2cores"),
    "presets table": Table(
        "memory",
        "offload-presets-1x-h100",
        columns=(
            *("step time", "GPU in use while generating", "policy's peak in logprob", "policy's peak in training"),
            *("copies per step", "exposed copies per step"),
        ),
    ),
    "largest table": Table(
        "analysis/memory",
        "largest-model-predicted-cpu-2cores",
        columns=("largest model, predicted", "its layers", "largest gpu_memory_utilization with 24 layers"),
    ),
    "apart table": Table(
        "analysis/refit",
        "refit-apart-qwen3-8b-2x-h200",
        columns=("refit time", "transfer alone"),
        settings=(
            *("1 GB buckets, 1 buffers", "1 GB buckets, 2 buffers", "1 GB buckets, 2 buffers, verify=full"),
            *("tensor by tensor, sequential", "vLLM's packed transfer"),
        ),
    ),
    "NeMo-RL's transfer table": Table(
        "analysis/refit",
        "refit-nemo-apart-qwen3-8b-2x-h200",
        columns=("refit time",),
        settings=("1 GB buckets, 2 buffers", "NeMo-RL's packed transfer"),
    ),
    "shared table": Table("analysis/refit", "refit-shared-qwen3-8b-2x-h200", columns=("refit time",)),
    "bytes table": Table(
        "analysis/refit",
        "refit-bytes-cpu",
        columns=(
            *("weights", "sent by the policy GPU that sends most", "sent by the policy GPU that sends least"),
            *("received by an engine GPU", "process groups of a rank"),
        ),
    ),
    "LoRA refit table": Table(
        "analysis/supervised",
        "lora-refit-large-1x-h100",
        columns=(
            *("step time", "generation", "train", "refit", "refit, transfer and load", "bytes of a refit"),
            *("policy's memory in training", "GPU in use while generating"),
        ),
    ),
    "SFT then GRPO table": Table("analysis/supervised", "learning-gsm8k-1x-h100"),
    "throughput table": Table("analysis/supervised", "sft-throughput-qwen3-1.7b-1x-h100"),
    "soak table": Table(
        "analysis/faults",
        "soak-cpu-2cores",
        (
            *(f"from a killed {who} to the next step's end" for who in KILLED),
            "kills",
            "steps taken again",
            "end to end",
        ),
    ),
    "faults soak table": Table(
        "analysis/faults",
        "faults-soak-cpu-2cores",
        (
            *(
                f"from a killed {who} to the next step's end"
                for who in ("rollouts-0", "generation-0", "policy-1", "policy-0", "launcher")
            ),
            *("kills", "steps taken again", "end to end"),
        ),
    ),
    "async soak table": Table(
        "analysis/async",
        "async-soak-cpu-2cores",
        (
            *(f"from a killed {who} to the next step's end" for who in ("generation-1", *KILLED)),
            *("kills", "steps taken again", "end to end", "maximum staleness"),
        ),
    ),
    "workers soak table": Table(
        "analysis/async",
        "plane-soak-cpu-2cores",
        (
            *(f"from a killed {who} to the next step's end" for who in ("rollouts-0", "rollouts-1", *KILLED)),
            *("kills", "steps taken again", "end to end"),
        ),
    ),
    "async rate table": Table(
        "analysis/async",
        "async-rate-2x-h200",
        columns=(
            *("throughput over the step", "step time", "policy idle", "logprob", "train"),
            *("refit", "engines idle", "mean staleness"),
        ),
    ),
    "plan time table": Table(
        "analysis/async",
        "plan-time-against-measured-cpu-2cores",
        tuple(
            f"{phase}: predicted over measured" for phase in ("generation", "logprob", "train", "refit", "step time")
        ),
    ),
    "admission table": Table(
        "analysis/full_caches",
        "admission-cpu",
        columns=("throughput", "rollout", "preemptions", "tokens computed again, per sampled token"),
    ),
    "restart table": Table("analysis/faults", "restart-cpu-2cores"),
    "month table": Table("analysis/faults", "month-cpu", columns=("goodput", "mean ends per run")),
    "full cache table": Table(
        "analysis/full_caches", "full-cache-1x-h100", columns=("throughput", "rollout", "preemptions")
    ),
    "one engine table": Table(
        "analysis/engines",
        "plane-step-1x-h200",
        columns=("step time", "generation", "train", "refit", "bandwidth share of decoding"),
    ),
    "queues table": Table(
        "analysis/plane",
        "plane-engines-8000-tokens-cpu-2cores",
        columns=("busy", "requests in flight", "throughput", "CPU of the queues"),
    ),
    "short responses table": Table(
        "analysis/plane",
        "plane-engines-1000-tokens-cpu-2cores",
        columns=("busy", "requests in flight", "throughput", "CPU of the queues"),
    ),
    "launcher table": Table(
        "analysis/plane",
        "plane-launcher-cpu-2cores",
        ("CPU per token", "CPU per episode", "bytes per token", "bytes per episode"),
    ),
    "replay bytes table": Table("analysis/plane", "plane-replay-cpu-2cores"),
    "versions table": Table(
        "analysis/engines",
        "engines-versions-1x-h100",
        columns=(
            *("step time", "generation", "train", "refit", "bandwidth share of decoding"),
            "command to first step",
        ),
    ),
    "engine settings table": Table(
        "analysis/engines",
        "decode-512-1x-h200",
        columns=("throughput", "start", "bandwidth share of decoding", "roofline share of decoding"),
    ),
    "precision table": Table(
        "analysis/engines",
        "engine-precision-smollm2-135m-instruct-1x-h100",
        columns=(
            *("mean logprob difference", "gen_kl_error", "token_mult_prob_error"),
            *("throughput while generating", "generation", "refit", "engine's weights", "step time"),
        ),
    ),
    "checkpoint io table": Table(
        "analysis/checkpoints",
        "checkpoint-io-cpu-2cores",
        columns=("save, training waits", "save, whole", "host memory of a save", "written", "load", "read"),
    ),
    "checkpoint GPU table": Table(
        "analysis/checkpoints",
        "checkpoint-io-1x-h200",
        tuple(
            f"{what}{rate}"
            for what in (
                *(f"{which}save, {part}" for which in ("first ", "") for part in ("training waits", "whole")),
                "load",
            )
            for rate in ("", ", of 100 GB at this rate")
        ),
    ),
    "shared prompts table": Table(
        "training",
        "shared-prompts-run-qwen3-1.7b-1x-h200",
        columns=("step time", "generation", "train", "refit", "policy's memory in training"),
    ),
    "peers table": Table("performance", figures.SPEED, columns=("step time",)),
    "published table": Table("analysis/published_row", "published-row-4-512-4x-h200", columns=PUBLISHED),
    "published one table": Table("analysis/published_row", "published-row-1-512-1x-h200", columns=PUBLISHED),
    "published partial table": Table(
        "analysis/published_row", "published-row-1-partial-512-1x-h200", columns=PUBLISHED
    ),
    "published rows table": Table(
        "analysis/published_row", "published-row-predicted-cpu-2cores", columns=PUBLISHED[:6], settings=ROWS
    ),
    "layouts table": Table("choosing", "choosing-predicted-cpu"),
    "longest table": Table("analysis/long_sequences", "context-longest-qwen3-8b-1x-h100", columns=LONGEST),
    "longest shared table": Table(
        "analysis/long_sequences", "context-longest-qwen3-8b-context-2-2x-h100", columns=LONGEST
    ),
    "replay table": Table(
        "analysis/moe",
        "experts-router-replay-qwen3-moe-1.5b-1x-h100",
        columns=(
            *("mean logprob difference", "max logprob difference", "gen_kl_error"),
            *("token_mult_prob_error", "generation", "logprob", "train", "step time"),
        ),
    ),
    "experts training table": Table("analysis/moe", "training-experts-1x-h200", columns=TRAINING),
    "training layouts table": Table("analysis/supervised", "training-layouts-2x-h200", columns=TRAINING),
    "tensor table": Table("training", "training-tensor-2x-h200", columns=TRAINING),
    "expert parallel table": Table("analysis/moe", "training-expert_parallel-2x-h200", columns=TRAINING),
    "precision training table": Table("training", "training-precision-1x-h200", columns=TRAINING),
    "experts rate table": Table(
        "analysis/moe",
        "experts-rate-2x-h100",
        columns=(
            *("throughput over the step", "generation", "logprob", "train", "MFU of training", "refit"),
            *("bytes of a refit", "mean logprob difference", "policy's peak, train"),
        ),
    ),
}


def main(arguments: list[str]) -> None:
    match arguments:
        case []:
            write_tables()
        case ["--check"]:
            if stale := [path.name for path in out_of_date()]:
                sys.exit(f"out of date: {', '.join(stale)}; run python scripts/bench/render.py")
        case ["--site"]:
            write_site(record.FOLDER)
        case _:
            sys.exit(__doc__)


def read_records() -> dict[str, dict[str, Any]]:
    """Return the records by the names of their files."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(record.FOLDER.glob("*.json"))}


def out_of_date() -> list[Path]:
    """Return the pages and pictures that show other than the records."""
    records = read_records()
    stale = [path for path, text in pages(records).items() if not path.exists() or path.read_text() != text]
    return stale + ([learning_figure.PICTURE] if learning_figure.is_stale(list(records.values())) else [])


def write_tables() -> None:
    records = read_records()
    for path, text in pages(records).items():
        path.write_text(text)
    if learning_figure.is_stale(list(records.values())):
        learning_figure.draw(list(records.values()))


def write_site(folder: Path) -> None:
    """Write the site's page of each record, which its search leaves out, and the list of them."""
    records, head = read_records(), "---\nsearch:\n  exclude: true\n---\n"
    for name, one in records.items():
        (folder / f"{name}.md").write_text("\n".join([head, *section(one)]))
    lines = [f"- [{name}]({name}.md)" for name in records]
    title = "# Records\n\nMade by `python scripts/bench/render.py --site` from the JSON files of this folder.\n"
    (folder / LIST.name).write_text("\n".join([head, title, *lines, ""]))


def pages(records: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Return each page and drawing with its rendered text."""
    paths = {table.page: DOCS / f"{table.page}.md" for table in TABLES.values()}
    texts = {page: path.read_text() for page, path in paths.items()}
    for mark, table in TABLES.items():
        before, rest = texts[table.page].split(f"<!-- {mark} -->\n")
        after = rest.split(f"<!-- /{mark} -->")[1]
        lines = _table_lines(table, records[table.record])
        texts[table.page] = "\n".join([f"{before}<!-- {mark} -->", *lines, f"<!-- /{mark} -->{after}"])
    before, rest = LEARNING.read_text().split("<!-- learning -->\n")
    learned = "".join(f"{line}\n" for line in learning_figure.table(list(records.values()), "../"))
    learned = f"{before}<!-- learning -->\n{learned}<!-- /learning -->{rest.split('<!-- /learning -->')[1]}"
    return {LEARNING: learned} | figures.pictures(records) | {paths[page]: text for page, text in texts.items()}


def _table_lines(table: Table, one: dict[str, Any]) -> list[str]:
    if "layouts" in one:
        return layouts_table(one["layouts"])
    if table.settings:
        one = one | {"results": [row for row in one["results"] if row["config"] in table.settings]}
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
        f"# {one['bench']} on {hardware['name']}",
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
    rows = (
        f"| {b['name']} | {b['target']} | {number(b['value'])} | {'yes' if b['met'] else 'no'} |" for b in one["bars"]
    )
    return ["| target | wanted | measured | met |", "|---|---:|---:|---|", *rows, ""]


def results_table(one: dict[str, Any], names: Sequence[str] = ()) -> list[str]:
    """Render a row for each quantity and setting, only those in `names` where given. A single run has no median."""
    rows = [row for row in one["results"] if not names or row["name"] in names]
    several = len({row["config"] for row in one["results"]}) > 1
    setting, line = (" setting |", "---|") if several else ("", "")
    repeated = any(len(row["reps"]) > 1 for row in rows)
    columns, lines = ("median | min | max", "---:|---:|---:") if repeated else ("value", "---:")
    table = [
        f"| measured |{setting} {columns} | unit |{' runs |' * repeated}",
        f"|---|{line}{lines}|---|{'---:|' * repeated}",
    ]
    for row in rows:
        reps = row["reps"]
        ends = (f"{number(min(reps))}", f"{number(max(reps))}") if len(reps) > 1 else ("", "")
        numbers = " | ".join([number(row["median"]), *(ends if repeated else ())])
        which = f" {row['config']} |" if several else ""
        table.append(f"| {row['name']} |{which} {numbers} | {row['unit']} |{f' {len(reps)} |' if repeated else ''}")
    return table


def number(value: float) -> str:
    """Return three significant digits without an exponent, such as 11,300 or 0.0312."""
    if value == 0 or abs(value) >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def settings_table(one: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Render a row for each setting, with the medians of the quantities `names`."""
    units = {row["name"]: row["unit"] for row in one["results"]}
    medians = {(row["config"], row["name"]): row["median"] for row in one["results"]}
    head = " | ".join(f"{name}, {units[name]}" if units[name] else name for name in names)
    lines = [f"| setting | {head} |", f"|---|{'---:|' * len(names)}"]
    for setting in dict.fromkeys(config for config, _ in medians):
        cells = (number(medians[setting, name]) if (setting, name) in medians else "" for name in names)
        lines.append(f"| {SHOWN.get(setting, setting)} | {' | '.join(cells)} |")
    return lines


def layouts_table(layouts: dict[str, str]) -> list[str]:
    """Render a row for each model and kind of training, and a column for each number of GPUs."""
    rows: dict[str, dict[str, str]] = {}
    for setting, layout in layouts.items():
        model, gpus = setting.rsplit(", ", 1)
        rows.setdefault(model, {})["1 GPU" if gpus == "1 GPUs" else gpus] = layout
    counts = list(next(iter(rows.values())))
    lines = [f"| {' | '.join([model, *(row[count] for count in counts)])} |" for model, row in rows.items()]
    return [f"| model, training | {' | '.join(counts)} |", f"|---|{'---|' * len(counts)}", *lines]


def trial() -> None:
    """Write the site's pages elsewhere, and render all tables without writing them."""
    folder = Path(os.environ["NRL_BENCH_OUT"])
    write_site(folder)
    print(len(list(folder.glob("*.md"))), "pages;", len(pages(read_records())), "pages with tables")


if __name__ == "__main__":
    record.start(main, trial)
