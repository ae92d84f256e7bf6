"""Pairs from solutions: each right one against each wrong one."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gsm8k_pairs.py"


def solution(text: str, right: bool) -> dict:
    return {"solution": text, "is_correct": right}


def convert(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, source, target], capture_output=True, text=True, check=False)


def test_each_right_solution_is_chosen_against_each_wrong_one(tmp_path):
    rows = [
        {"question": "2+2", "a": solution("4", True), "b": solution("5", False), "c": solution("6", False)},
        {"question": "1+1", "ground_truth": "2", "a": solution("2", True), "b": solution("2.", True)},
    ]
    (tmp_path / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = convert(tmp_path / "solutions.jsonl", tmp_path / "pairs.jsonl")
    assert done.returncode == 0 and done.stdout.startswith("2 pairs of 1 questions")
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert pairs == [{"prompt": "2+2", "chosen": "4", "rejected": wrong} for wrong in ("5", "6")]
