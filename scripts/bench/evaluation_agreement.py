"""Whether `nrl-lite evaluate` and lm-evaluation-harness agree on one model and the same prompts.

evaluation_agreement.py MODEL HARNESS GSM8K [--gsm8k 100] [--sums 200] [--samples 4] [--gsm8k-samples 1]

HARNESS: a Python interpreter with lm-eval[hf]. GSM8K: the file of its test questions. MODEL solves few of them, so both
also add numbers. Both answer in float32, by engines of their own (transformers' `generate` there, vLLM here), and
judge by their own rule: the last number. Each rule also judges the other's responses.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import record
from transformers import AutoTokenizer

from nemo_rl_lite.data.tokenizer import ChatTokenizer
from nemo_rl_lite.rewards.text import last_number
from nemo_rl_lite.rollout.episode import interval
from nemo_rl_lite.rollout.store import read_rollout

SAME_GREEDY, SEED = 0.9, 42


@dataclass(frozen=True)
class Task:
    """Problems (`prompt`, `answer`), the most tokens of a response, and the responses to each when they are sampled."""

    name: str
    problems: list[dict[str, str]]
    tokens: int
    samples: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "harness", "gsm8k_file"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--gsm8k", type=int, default=100)
    parser.add_argument("--sums", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--gsm8k-samples", type=int, default=1)
    parser.add_argument(
        "--work", type=Path, help="keeps what is sampled, for the same command later (default: nowhere)"
    )
    given = parser.parse_args()
    tasks = [
        Task("sums", sums(given.sums), 16, given.samples),
        Task("GSM8K", gsm8k(given.gsm8k_file, given.gsm8k), 256, given.gsm8k_samples),
    ]
    results, bars = list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for task in filter(lambda task: task.problems, tasks):
            for samples in sorted({1, task.samples}):
                folder = work / f"{task.name.lower()}-{samples}"
                folder.mkdir(exist_ok=True)
                own = ask_here(given.model.resolve(), task, samples, folder)
                theirs = harness.ask(
                    given.harness.absolute(), given.model.resolve(), task.problems, samples, task.tokens, folder / "lm"
                )
                found, kept = compare(given.model, task, samples, own, theirs)
                results, bars = results + found, bars + kept
                for row in [*found, *kept]:
                    print(json.dumps(row), flush=True)
    note = f"model: {given.model.name}, float32 on CPUs. Harness: "
    note += ", ".join(f"{name} {number}" for name, number in harness.versions(given.harness).items())
    # The record has no paths of this machine.
    sys.argv[1:] = [Path(one).name if one.startswith(("/", ".")) else one for one in _without_work(sys.argv[1:])]
    print(record.write("evaluation-agreement", results, bars, note))


def _without_work(arguments: list[str]) -> list[str]:
    place = arguments.index("--work") if "--work" in arguments else len(arguments)
    return arguments[:place] + arguments[place + 2 :]


def sums(count: int) -> list[dict[str, str]]:
    """Additions that a small model sometimes solves, the same ones each time."""
    every = [(one, other) for one in range(1, 20) for other in range(1, 20)]
    pairs = random.Random(0).sample(every, count)
    wish = "Answer with the number alone."
    return [{"prompt": f"What is {one} + {other}? {wish}", "answer": str(one + other)} for one, other in pairs]


def gsm8k(file: Path, count: int) -> list[dict[str, str]]:
    """The first questions, with a request that a last number answers."""
    rows = [json.loads(line) for line in file.read_text().splitlines()[:count]]
    wish = "Reason step by step, and end with the final number."
    answers = [row["answer"].split("####")[1].strip().replace(",", "") for row in rows]
    return [
        {"prompt": f"{row['question']}\n{wish}", "answer": answer} for row, answer in zip(rows, answers, strict=True)
    ]


def ask_here(model: Path, task: Task, samples: int, folder: Path) -> list[list[dict[str, Any]]]:
    """Return `samples` rows of responses to each problem, greedy where it is 1."""
    file, output = folder / "problems.jsonl", folder / "own"
    file.write_text("".join(json.dumps(row) + "\n" for row in task.problems))
    command = [sys.executable, "-m", "nemo_rl_lite.evaluate", str(model), f"--samples={samples}", f"--output={output}"]
    command += [f"--temperature={int(samples > 1)}", "data=file", f"data.validation_path={file}", "reward=last_number"]
    command += [f"generation.max_new_tokens={task.tokens}", "generation.vllm_cfg.max_num_seqs=32"]
    command += ["policy.precision=float32", "policy.max_total_sequence_length=1024", f"algorithm.seed={SEED}"]
    environment = os.environ | {"PYTHONPATH": str(record.ROOT)}
    subprocess.run(command, cwd=record.ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = read_rollout(output / "rollouts" / "step-00000000-validation.parquet")
    return [rows[start : start + samples] for start in range(0, len(rows), samples)]


def compare(
    model: Path, task: Task, samples: int, own: list[list[dict[str, Any]]], theirs: list[list[harness.Asked]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the measured quantities and the bars of one task: accuracies by both rules, how sure their difference is,
    and of greedy responses how many are the same."""
    how = "greedy" if samples == 1 else f"avg@{samples}, temperature 1"
    setting = f"{task.name}, {len(task.problems)} problems, {how}, at most {task.tokens} tokens"
    answers = [row["answer"] for row in task.problems]
    ours = _table([[row["response"] for row in group] for group in own], answers)
    others = _table([[one.response for one in group] for group in theirs], answers)
    judged_here = np.array([[row["reward"] for row in group] for group in own])
    judged_there = np.array([[one.right for one in group] for group in theirs], float)
    difference_P = (judged_here - judged_there).mean(axis=1)
    low, high = interval(difference_P, np.ones(len(difference_P)))

    def rows(name: str, table_PK: np.ndarray) -> dict[str, Any]:
        return record.result(name, setting, "share", [float(share) for share in table_PK.mean(axis=0)])

    results = [
        rows("nrl-lite evaluate, its rule", judged_here),
        rows("lm-evaluation-harness, its rule", judged_there),
        rows("nrl-lite's responses, the harness's rule", ours["harness"]),
        rows("the harness's responses, nrl-lite's rule", others["own"]),
        record.result("difference of the accuracies", setting, "share", [float(difference_P.mean())]),
        record.result("its 95 % interval, low", setting, "share", [low]),
        record.result("its 95 % interval, high", setting, "share", [high]),
    ]
    bars = [record.bar(f"{setting}: distance of the interval from no difference", max(low, -high, 0.0), 0.0, False)]
    bars.append(record.bar(f"{setting}: same prompts", _same_prompts(model, task, theirs), 1.0, True))
    as_judged = float((others["harness"] == judged_there).mean())
    bars.append(record.bar(f"{setting}: harness's rule judges here as there", as_judged, 1.0, True))
    if samples == 1:
        same = [a[0]["response"].strip() == b[0].response.strip() for a, b in zip(own, theirs, strict=True)]
        verdicts = float((judged_here == judged_there).mean())
        results.append(record.result("same greedy response", setting, "share", [float(np.mean(same))]))
        results.append(record.result("same verdict on a problem", setting, "share", [verdicts]))
        bars.append(record.bar(f"{setting}: same greedy response", float(np.mean(same)), SAME_GREEDY, True))
    return results, bars


def _table(responses: list[list[str]], answers: list[str]) -> dict[str, np.ndarray]:
    """Whether each response passes, by both rules: [problems, samples]."""
    pairs = list(zip(responses, answers, strict=True))
    return {
        "own": np.array([[last_number(one, answer) for one in group] for group, answer in pairs]),
        "harness": np.array([[float(harness.passes(one, answer)) for one in group] for group, answer in pairs]),
    }


def _same_prompts(model: Path, task: Task, theirs: list[list[harness.Asked]]) -> float:
    """The share of problems whose token ids are the same here and there."""
    here, plain = ChatTokenizer(model), AutoTokenizer.from_pretrained(model)
    same = [
        here.prompt([{"role": "user", "content": row["prompt"]}])
        == plain(group[0].prompt, add_special_tokens=False)["input_ids"]
        for row, group in zip(task.problems, theirs, strict=True)
    ]
    return float(np.mean(same))


if __name__ == "__main__":
    main()
