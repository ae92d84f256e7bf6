"""Make preference pairs of the example solutions that come with GSM8K: gsm8k_pairs.py SOLUTIONS.jsonl PAIRS.jsonl

Each right solution of a question is chosen over each wrong one. They answer test questions, so a test score after
training on them means nothing; data.validation_fraction holds out whole questions.
"""

import json
import sys
from itertools import product
from pathlib import Path


def pairs_of(row: dict) -> list[dict[str, str]]:
    """Return the pairs of one question; none where all of its solutions are right, or all wrong."""
    solutions = [value for value in row.values() if isinstance(value, dict) and "is_correct" in value]
    right, wrong = ([one["solution"] for one in solutions if one["is_correct"] is good] for good in (True, False))
    unlike = sorted({(chosen, rejected) for chosen, rejected in product(right, wrong) if chosen != rejected})
    return [{"prompt": row["question"], "chosen": chosen, "rejected": rejected} for chosen, rejected in unlike]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    if not source.is_file():
        sys.exit(f"{source}: no such file")
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    pairs = [pair for row in rows for pair in pairs_of(row)]
    target.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{len(pairs)} pairs of {len({pair['prompt'] for pair in pairs})} questions in {target}")


if __name__ == "__main__":
    main()
