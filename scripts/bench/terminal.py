"""Record a command's terminal as an asciicast, and draw it as an animated SVG.

python scripts/bench/terminal.py NAME COMMAND...   writes docs/benchmarks/NAME.cast and docs/images/NAME.svg

render.py draws every cast again. A cast also plays in asciinema.
"""

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import record
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

IMAGES = record.ROOT / "docs" / "images"
COLUMNS, ROWS = 128, 20
COLUMN, ROW = 6.6, 16
"""Pixels of a character."""
PLAYED_S, LAST_S, SHORTEST_S, WAIT_S = 20.0, 5.0, 0.12, 3.0
"""Seconds of the animation, of its last frame in addition, of its shortest frame, and of the longest wait."""
STYLE = (
    "text{font:11px ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace;fill:#e6edf3;white-space:pre}"
    ".b{font-weight:bold}.d{fill:#9198a1}.c1{fill:#ff7b72}.c2{fill:#3fb950}.c3{fill:#e3b341}.c4{fill:#79c0ff}"
    ".c5{fill:#d2a8ff}.c6{fill:#56d4dd}.f{opacity:0}.f:last-child{opacity:1}"
    "@media(prefers-reduced-motion:reduce){.f{animation:none!important}}"
)
# A line's end, an erased line, a line up, text with its colours, and other codes, which change no text.
TOKENS = re.compile(r"(\n)|(\x1b\[2?K)|(\x1b\[\d*A)|((?:\x1b\[[\d;]*m|[^\n\r\x1b])+)|\r|\x1b\[[?\d;]*[a-zA-Z]")
SPINNER = re.compile("[\u2800-\u28ff]")
CONSOLE = Console(force_terminal=True)
Event = tuple[float, str]


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        sys.exit(__doc__)
    name, *command = arguments
    cast = record.FOLDER / f"{name}.cast"
    if status := save(cast, command):
        sys.exit(f"status {status} of {command}")
    (IMAGES / f"{name}.svg").write_text(draw(cast))


def pictures() -> dict[Path, str]:
    """Return the animation of each recording, by its path."""
    return {IMAGES / f"{cast.stem}.svg": draw(cast) for cast in sorted(record.FOLDER.glob("*.cast"))}


def save(cast: Path, command: list[str]) -> int:
    """Run the command in a terminal, and write what it prints, with paths below this folder; return its exit status."""
    process, terminal = pty.fork()
    if not process:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, events = time.monotonic(), []
    with open(terminal, "rb", buffering=0) as output:  # noqa: PTH123
        for text in _chunks(output):
            sys.stdout.write(text)
            events.append([round(time.monotonic() - began, 3), "o", text.replace(f"{Path.cwd()}/", "")])
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "command": " ".join(command)}
    cast.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (header, *events)))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _chunks(output: BinaryIO) -> Iterator[str]:
    """Yield what a terminal prints, in whole characters."""
    decoder = getincrementaldecoder("utf-8")()
    while True:
        try:
            read = output.read(65536)
        except OSError:
            # Linux: the command has closed its terminal.
            return
        if not read:
            return
        yield decoder.decode(read)


def draw(cast: Path) -> str:
    """Return the animation, at constant speed but for waits."""
    lines = cast.read_text().splitlines()
    frames = _frames(_without_waits(json.loads(line) for line in lines[1:]))
    command = json.loads(lines[0])["command"]
    first, last = frames[0][0], frames[-1][0]
    speed = max((last - first) / PLAYED_S, 0.001)
    shown = [(max(at - first, 0) / speed, screen) for at, screen in frames]
    shown = [one for one, after in pairwise(shown) if after[0] - one[0] >= SHORTEST_S] + shown[-1:]
    total = shown[-1][0] + LAST_S
    texts = {line: f"l{place}" for place, line in enumerate(dict.fromkeys(row for _, rows in shown for row in rows))}
    width, height = round(COLUMNS * COLUMN) + 20, ROWS * ROW + 46
    drawn, styles = [], [STYLE]
    for place, (at, rows) in enumerate(shown):
        begin, end = at / total * 100, (shown[place + 1][0] / total * 100 if place + 1 < len(shown) else 100)
        styles.append(
            f"@keyframes k{place}{{0%{{opacity:{int(not place)}}}{begin:.2f}%{{opacity:1}}{end:.2f}%,100%"
            f"{{opacity:{int(end == 100)}}}}}"
        )
        used = (f'<use href="#{texts[row]}" y="{n * ROW}"/>' for n, row in enumerate(rows) if row)
        drawn.append(f'<g class="f" style="animation:k{place} {total:.1f}s step-end infinite">{"".join(used)}</g>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(command)}, at {speed:.0f} times its speed</title>",
            f"<style>{''.join(styles)}</style>",
            "<defs>",
            *(f'<text id="{name}" x="10" y="44">{line}</text>' for line, name in texts.items()),
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117" stroke="#30363d"/>',
            *(f'<circle cx="{18 + 18 * n}" cy="16" r="5" fill="#30363d"/>' for n in range(3)),
            f'<text class="d" x="{width - 12}" y="20" text-anchor="end">{speed:.0f}x</text>',
            "<g>",
            *drawn,
            "</g>",
            "</svg>\n",
        ]
    )


def _without_waits(events: Iterable[tuple[float, str, str]]) -> Iterator[Event]:
    """Yield texts and when they are shown, with waits of at most WAIT_S."""
    shown, before = 0.0, 0.0
    for at, _, text in events:
        shown, before = shown + min(at - before, WAIT_S), at
        yield shown, SPINNER.sub("\u280b", text)


def _frames(events: Iterable[Event]) -> list[tuple[float, tuple[str, ...]]]:
    """Return the screens and when they appear. A screen has ROWS lines as SVG."""
    lines, row, frames = [""], 0, []
    for at, text in events:
        for end, erased, up, printed in TOKENS.findall(text):
            if end:
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif erased:
                lines[row] = ""
            elif up:
                row = max(row - int(up[2:-1] or 1), 0)
            elif printed:
                lines[row] += printed
        screen = tuple([part for line in lines for part in _drawn(line)][-ROWS:])
        if not frames or screen != frames[-1][1]:
            frames.append((at, screen))
    return frames


def _drawn(line: str) -> Iterator[str]:
    """Yield a line of the terminal as SVG, in parts of COLUMNS characters."""
    text = Text.from_ansi(line)
    for part in text.divide(range(COLUMNS, len(text), COLUMNS)):
        yield "".join(map(_span, part.render(CONSOLE)))


def _span(segment: Segment) -> str:
    words, style = escape(segment.text, quote=False), segment.style or Style.null()
    kinds = ["b"] * bool(style.bold) + ["d"] * bool(style.dim)
    kinds += [f"c{style.color.number % 8}"] if style.color and style.color.number is not None else []
    return f'<tspan class="{" ".join(kinds)}">{words}</tspan>' if kinds and words.strip() else words


def trial() -> None:
    """Record a short command, and draw it."""
    cast = Path(os.environ["NRL_BENCH_OUT"]) / "terminal.cast"
    if status := save(cast, [sys.executable, "-c", "print('\\x1b[1mloss\\x1b[0m 0.5')"]):
        sys.exit(f"status {status}")
    print(len(draw(cast)), "characters")


if __name__ == "__main__":
    record.start(main, trial)
