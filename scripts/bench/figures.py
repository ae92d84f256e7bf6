"""Draw pictures of the documentation from records, as SVG with its own background for light and dark pages.

`pictures()` returns each picture by its path; render.py writes them.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import record
import terminal

FOLDER = record.ROOT / "docs" / "images"
SPEED = max((one.stem for one in record.FOLDER.glob("peers-1.7b-*.json")), default="speed-over-trl-large-1x-h200")
SPLIT, SHARED = "async-rate-2x-h200", "async-rate-colocated-2x-h200"
DIRECT, BROADCAST = "refit-shared-qwen3-8b-2x-h200", "refit-apart-qwen3-8b-2x-h200"
MEMORY = "memory-by-phase-predicted-cpu"
SUMS = [record.FOLDER / "runs" / f"chain-sum-seed{seed}.json" for seed in (1, 2, 42)]
STYLE = """
text{font:14px system-ui,sans-serif;fill:#1f2328}.small{font-size:12px}.bold{font-weight:600}
.middle{text-anchor:middle}.end{text-anchor:end}.card{fill:#fff}.on{fill:#1f2328}.line{stroke:#59636e;fill:none}
.box{fill:none;stroke:#818b98;stroke-dasharray:4 3}.a{fill:#4ac26b}.b{fill:#e3b341}.c{fill:#54aeff}.d{fill:#cf222e}
.e{fill:#c297ff}.f{fill:#fd8c73}.g{fill:#afb8c1}.h{fill:#8ddb8c}.i{fill:#d1d9e0}
@media(prefers-color-scheme:dark){.card{fill:#0d1117}text{fill:#e6edf3}.on{fill:#1f2328}.line,.box{stroke:#9198a1}.i{fill:#30363d}}
"""
Record = Mapping[str, Any]


class Picture:
    """An SVG of `width` x `height` pixels. Coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="g" d="M0 0L10 5L0 10z"/></marker></defs>',
            f'<rect class="card" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self._shapes.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, words: str = "") -> None:
        """Draw a rectangle with words in its middle."""
        self._shapes.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 4, words, "small middle on")

    def line(self, x: float, y: float, to_x: float, to_y: float, arrow: bool = False) -> None:
        end = ' marker-end="url(#head)"' if arrow else ""
        self._shapes.append(f'<path class="line" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"{end}/>')

    def curve(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')

    def legend(self, x: float, y: float, entries: Mapping[str, str]) -> None:
        """Draw a colour and its meaning for each entry."""
        for kind, words in entries.items():
            self.box(x, y - 11, 14, 14, kind)
            self.text(x + 20, y, words, "small")
            x += 42 + 6.6 * len(words)

    def __str__(self) -> str:
        return "\n".join([*self._shapes, "</svg>\n"])


def pictures(records: Mapping[str, Record]) -> dict[Path, str]:
    """Return every picture by its path."""
    drawn = {
        "speed": speed(records[SPEED]),
        "timeline": timeline(records[SPLIT], records[SHARED]),
        "memory": memory(records[MEMORY]),
        "refit": refit(records[DIRECT], records[BROADCAST]),
        "rewards": rewards([json.loads(path.read_text()) for path in SUMS]),
    }
    return {FOLDER / f"{name}.svg": str(picture) for name, picture in drawn.items()} | terminal.pictures()


def medians(one: Record, setting: str) -> dict[str, float]:
    """Return the median of each quantity of a setting."""
    return {row["name"]: row["median"] for row in one["results"] if row["config"] == setting}


def speed(one: Record) -> Picture:
    """Draw the step time of nemo_rl_lite and its peers: a bar for each setting."""
    rows = [(row["median"], row["config"].split(", fast")[0]) for row in one["results"] if row["name"] == "step time"]
    longest = max(seconds for seconds, _ in rows)
    picture = Picture(680, 30 * len(rows) + 10, "Step time of nemo_rl_lite and its peers")
    for place, (seconds, name) in enumerate(sorted(rows)):
        top, length = 30 * place + 10, seconds / longest * 340
        picture.text(250, top + 15, name, "end")
        picture.box(260, top, length, 20, "c" if name == "nemo_rl_lite" else "g")
        picture.text(268 + length, top + 15, f"{seconds:.1f} s")
    return picture


def rewards(runs: Sequence[Record]) -> Picture:
    """Draw the training reward of runs with different seeds: a curve each, over steps."""
    left, bottom, width, height = 50, 180, 560, 150
    picture = Picture(640, 226, "Training reward of three seeds over steps")
    for share in (0, 0.5, 1):
        picture.line(left, bottom - height * share, left + width, bottom - height * share)
        picture.text(left - 8, bottom - height * share + 4, f"{share:g}", "small end")
    steps = max(step for run in runs for step, _ in run["series"]["train/reward"])
    for step in range(0, steps + 1, 20):
        picture.text(left + width * step / steps, bottom + 18, f"{step}", "small middle")
    picture.text(left + width / 2, bottom + 36, "step", "small middle")
    picture.text(left, 18, "reward", "small")
    for run, colour in zip(runs, ("#0072B2", "#D55E00", "#009E73"), strict=True):
        points = run["series"]["train/reward"]
        picture.curve([(left + width * step / steps, bottom - height * reward) for step, reward in points], colour)
    return picture


# --- A step's timeline

LEFT, SECOND, WINDOW = 120, 25.0, 25.0
"""Pixels left of the time axis, pixels of a second, seconds shown."""


def timeline(split: Record, shared: Record) -> Picture:
    """Draw what engines and policy do during some steps, by source of rollouts."""
    picture = Picture(880, 372, "Timeline of sync and asynchronous steps on two GPUs")
    picture.legend(LEFT, 26, {"a": "generate", "b": "logprob", "c": "train", "d": "refit", "i": "idle"})
    groups = (
        ("sync", "sync, 1 + 1 GPUs", 0),
        ("one step off", "one step off, 1 + 1 GPUs", 1),
        ("queue, staleness 2", "queue, staleness 2, 1 + 1 GPUs", 2),
    )
    for place, (name, setting, ahead) in enumerate(groups):
        found = medians(split, setting)
        top = 46 + 84 * place
        _apart(picture, top, found, ahead)
        _named(picture, top, name, found["step time"], ("engine GPU", "policy GPU"))
    found, top = medians(shared, "sync, colocated"), 46 + 84 * len(groups)
    _colocated(picture, top, found)
    _named(picture, top, "sync, engines on the policy's GPUs", found["step time"], ("both GPUs",))
    for second in range(0, int(WINDOW) + 1, 5):
        picture.line(LEFT + second * SECOND, 342, LEFT + second * SECOND, 348)
        picture.text(LEFT + second * SECOND, 362, f"{second} s", "small middle")
    picture.line(LEFT, 342, LEFT + WINDOW * SECOND, 342)
    return picture


def _named(picture: Picture, top: float, name: str, seconds: float, rows: tuple[str, ...]) -> None:
    picture.text(LEFT, top + 10, name, "small bold")
    for row, words in enumerate(rows):
        picture.text(LEFT - 8, top + 31 + 24 * row, words, "small end")
    picture.text(LEFT + WINDOW * SECOND + 10, top + 19 + 12 * len(rows), f"{seconds:.1f} s per step", "small bold")


def _block(picture: Picture, top: float, begin: float, end: float, kind: str, words: str = "") -> None:
    """Draw the part of a block that is in the window; without words where they do not fit."""
    end = min(end, WINDOW)
    width = (end - begin) * SECOND
    if width > 0:
        picture.box(LEFT + begin * SECOND, top, max(width - 1, 2), 22, kind, words if width > 7 * len(words) else "")


def _apart(picture: Picture, top: float, found: Mapping[str, float], ahead: int) -> None:
    """Draw steps whose engines generate for the step `ahead` steps later, on other GPUs."""
    engines, policy, begin, step = top + 15, top + 39, 0.0, 1
    while begin < WINDOW:
        end = begin + found["step time"]
        generated = found["policy idle"] if not ahead else found["step time"] - found["engines idle"]
        trained = end - found["refit"]
        _block(picture, engines, begin, begin + generated, "a", f"rollout {step + ahead}")
        _block(picture, engines, begin + generated, trained, "i")
        if not ahead:
            _block(picture, policy, begin, begin + generated, "i")
        learned = trained - found["train"]
        _block(picture, policy, learned - found["logprob"], learned, "b", "logprob")
        _block(picture, policy, learned, trained, "c", f"train {step}")
        for row in (engines, policy):
            _block(picture, row, trained, end, "d")
        begin, step = end, step + 1


def _colocated(picture: Picture, top: float, found: Mapping[str, float]) -> None:
    """Draw steps whose phases follow each other on the same GPUs."""
    begin, step, row = 0.0, 1, top + 15
    while begin < WINDOW:
        end = begin + found["step time"]
        trained = end - found["refit"]
        learned = trained - found["train"]
        _block(picture, row, begin, begin + found["policy idle"], "a", f"rollout {step}")
        _block(picture, row, learned - found["logprob"], learned, "b", "")
        _block(picture, row, learned, trained, "c", f"train {step}")
        _block(picture, row, trained, end, "d")
        begin, step = end, step + 1


# --- Memory by phase

COMPONENTS = {
    "parameters": ("c", "parameters"),
    "gradients": ("e", "gradients"),
    "optimizer_states": ("f", "optimizer states"),
    "activations": ("b", "activations"),
    "generation_weights": ("a", "engine weights"),
    "kv_cache": ("h", "KV cache"),
    "other": ("g", "buffers, contexts"),
}
"""Colours and names of components, from the bottom of a bar to its top."""
GPU_GIB, GIB, BOTTOM = 79.2, 2.7, 264
"""Memory of the GPU, pixels of a GiB, and the foot of the bars."""


def memory(one: Record) -> Picture:
    """Draw the predicted memory of a GPU: a panel for each preset, a bar for each phase."""
    picture = Picture(880, 336, "Memory of a GPU by phase and offload preset")
    picture.legend(24, 26, dict(COMPONENTS.values()))
    for gib in (0, 20, 40, 60, GPU_GIB):
        picture.text(58, BOTTOM - gib * GIB + 4, f"{gib:.0f} GiB", "small end")
    picture.line(66, BOTTOM - GPU_GIB * GIB, 860, BOTTOM - GPU_GIB * GIB)
    for place, preset in enumerate(dict.fromkeys(row["config"] for row in one["results"])):
        left, found = 72 + 270 * place, medians(one, preset)
        picture.text(left + 118, BOTTOM + 60, f"offload={preset}", "middle bold")
        for column, phase in enumerate(dict.fromkeys(name.split(", ")[0] for name in found)):
            x, top = left + 62 * column, float(BOTTOM)
            for name, (kind, _) in COMPONENTS.items():
                height = found[f"{phase}, {name}"] * GIB
                top -= height
                if height >= 1:
                    picture.box(x, top, 50, height - 0.5, kind)
            picture.text(x + 25, BOTTOM + 18, phase, "small middle")
            picture.text(x + 25, BOTTOM + 34, f"{(BOTTOM - top) / GIB:.0f} GiB", "small middle")
    return picture


# --- The refit's transports


def refit(direct: Record, broadcast: Record) -> Picture:
    """Draw the transports of weights from policy to engine: three with seconds for the same model, and windows."""
    buckets = "1 GB buckets, 2 buffers"
    gigabytes = medians(broadcast, buckets)["bytes of a refit"]
    picture = Picture(860, 500, "Transports of a refit: direct copies, shared buckets, broadcast, windows")
    columns = (
        ("direct copies", "CUDA IPC", medians(direct, "direct")["refit time"]),
        ("shared buckets", "pack, CUDA IPC, load", medians(direct, buckets)["refit time"]),
        ("broadcast of buckets", "pack, NCCL, load", medians(broadcast, buckets)["refit time"]),
    )
    for place, (name, means, seconds) in enumerate(columns):
        x = 20 + 280 * place
        picture.text(x + 130, 28, name, "bold middle")
        picture.text(x + 130, 222, f"{means}: {seconds * 1000:.0f} ms", "small middle")
    picture.text(430, 242, f"median refit of {gigabytes:.1f} GB of bf16 weights on H200", "small middle")
    for x, width, words in (
        *((20, 260, "shared GPU"), (300, 260, "shared GPU")),
        *((576, 132, "policy's GPU"), (718, 132, "engine's GPU")),
    ):
        picture.box(x, 42, width, 160, "box")
        picture.text(x + width / 2, 60, words, "small middle")
    _slices(picture, 32, 84, "c", "parameters")
    _slices(picture, 184, 84, "a", "weights")
    for row in range(ROWS):
        picture.line(118, _middle(row), 181, _middle(row), arrow=True)
    _slices(picture, 310, 74, "c", "parameters")
    _slices(picture, 476, 74, "a", "weights")
    _slices(picture, 412, 36, "b", "buffer", 2)
    _slices(picture, 585, 66, "c", "parameters")
    _slices(picture, 668, 32, "b", "", 2)
    _slices(picture, 726, 32, "b", "", 2)
    _slices(picture, 775, 66, "a", "weights")
    for begin, end in ((386, 410), (450, 474), (653, 666), (702, 724), (760, 773)):
        picture.line(begin, _middle(1.5), end, _middle(1.5), arrow=True)
    _windows(picture, 278)
    return picture


def _windows(picture: Picture, top: float) -> None:
    """Draw two policy ranks, of which each sends its parts to two engine ranks."""
    picture.text(430, top, "windows, after the first refit", "bold middle")
    for rank in (0, 1):
        y = top + 14 + 92 * rank
        for x, owner in ((150, "policy"), (460, "engine")):
            picture.box(x, y, 250, 84, "box")
            picture.text(x + 125, y + 18, f"GPU of {owner} rank {rank}", "small middle")
        first, middle = y + 46, y + 60
        _slices(picture, 166, 90, "c", "parameters", 2, first, 32)
        _slices(picture, 348, 40, "b", "", 2, first, 32)
        _slices(picture, 472, 40, "b", "", 2, first, 32)
        _slices(picture, 604, 90, "a", "weights", 2, first, 32)
        for begin, end in ((258, 346), (514, 602)):
            picture.line(begin, middle, end, middle, arrow=True)
        for receiver in (0, 1):
            picture.line(390, middle, 470, middle + 92 * (receiver - rank), arrow=True)
    words = "all ranks send at once, each only the parts that an engine rank needs: pack, NCCL, load"
    picture.text(430, top + 214, words, "small middle")


ROWS, FIRST, HEIGHT = 4, 88, 104
"""Slices of a rank's weights, where they begin, and how high they are together."""


def _middle(row: float) -> float:
    return FIRST + HEIGHT / ROWS * (row + 0.5)


def _slices(
    picture: Picture,
    x: float,
    width: float,
    kind: str,
    words: str,
    rows: int = ROWS,
    first: float = FIRST,
    height: float = HEIGHT,
) -> None:
    """Draw a name above slices of weights, or above buckets."""
    picture.text(x + width / 2, first - 8, words, "small middle")
    for row in range(rows):
        picture.box(x, first + height / rows * row, width, height / rows - 4, kind)
