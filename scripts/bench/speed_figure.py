"""Draw the step time of nemo_rl_lite and TRL as docs/images/speed.svg, from the record of trl_step.py."""

from typing import Any

import record

PICTURE = record.ROOT / "docs" / "images" / "speed.svg"
RECORD = "speed-over-trl-large-1x-h200"
STYLE = "text{font:14px sans-serif;fill:#24292f}@media(prefers-color-scheme:dark){text{fill:#d0d7de}}"
LABEL, LENGTH, HEIGHT = 250, 360, 30


def svg(one: dict[str, Any]) -> str:
    """Return the picture: a bar for each setting, with its median in seconds."""
    rows = [(row["config"].split(", fast")[0], row["median"]) for row in one["results"] if row["name"] == "step time"]
    longest, shapes = max(seconds for _, seconds in rows), []
    for place, (name, seconds) in enumerate(rows):
        top, length, colour = place * HEIGHT, round(seconds / longest * LENGTH), "#8c959f" if place else "#0969da"
        shapes += [
            f'<text x="{LABEL - 10}" y="{top + 20}" text-anchor="end">{name}</text>',
            f'<rect x="{LABEL}" y="{top + 5}" width="{length}" height="20" rx="3" fill="{colour}"/>',
            f'<text x="{LABEL + length + 8}" y="{top + 20}">{seconds:.1f} s</text>',
        ]
    size = f'width="{LABEL + LENGTH + 70}" height="{len(rows) * HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>'
    return "\n".join([head, *shapes, "</svg>\n"])
