"""Ask a model a file of problems with lm-evaluation-harness, and apply the harness's answer rule to other responses."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The rule of the harness's own gsm8k task (`flexible-extract`): its last number, and what it ignores in a comparison.
_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")
_TASK = "agreement"


@dataclass(frozen=True)
class Asked:
    """A response, the prompt that the model has read, and whether its task's own rule has found it right."""

    prompt: str
    response: str
    right: bool


def passes(response: str, answer: str) -> bool:
    """Whether the harness's rule finds the answer in a response."""
    found = _NUMBER.findall(response)
    last = next((group for group in found[-1] if group), "").strip() if found else "[invalid]"
    return _plain(last) == _plain(answer)


def _plain(text: str) -> str:
    for ignored in _IGNORED:
        text = re.sub(ignored, "", text)
    return text.lower()


def ask(
    interpreter: Path, model: Path, problems: list[dict[str, str]], samples: int, tokens: int, folder: Path
) -> list[list[Asked]]:
    """Return `samples` responses to each problem (`prompt`, `answer`) in float32; greedy ones where it is 1.

    The harness samples a row once, so that a problem's samples are rows of their own, with the noise of one generator.
    What is in the folder already is not sampled again.
    """
    if not (sampled := list(folder.rglob(f"samples_{_TASK}_*.jsonl"))):
        _run(interpreter, model, problems, samples, tokens, folder)
        sampled = list(folder.rglob(f"samples_{_TASK}_*.jsonl"))
    found = sorted((json.loads(line) for line in sampled[0].read_text().splitlines()), key=lambda row: row["doc_id"])
    asked = [_asked(row) for row in found]
    return [asked[start : start + samples] for start in range(0, len(asked), samples)]


def _run(
    interpreter: Path, model: Path, problems: list[dict[str, str]], samples: int, tokens: int, folder: Path
) -> None:
    folder.mkdir(exist_ok=True)
    rows = [problem for problem in problems for _ in range(samples)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # JSON is YAML.
    (folder / "agreement.yaml").write_text(json.dumps(_task(folder / "rows.jsonl", tokens, greedy=samples == 1)))
    command = [str(interpreter), "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "32"]
    command += ["--model_args", f"pretrained={model},dtype=float32", "--tasks", _TASK, "--include_path", str(folder)]
    command += ["--apply_chat_template", "--log_samples", "--output_path", str(folder / "out"), "--seed", "1"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    # OpenMP threads that spin take the cores from other processes.
    offline["OMP_WAIT_POLICY"] = "PASSIVE"
    subprocess.run(command, env=os.environ | offline, check=True, stdout=subprocess.DEVNULL)


def _task(rows: Path, tokens: int, greedy: bool) -> dict[str, Any]:
    # Without top_k the model would sample from 50 tokens, transformers' default.
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    pattern = {"function": "regex", "group_select": -1, "regex_pattern": _NUMBER.pattern}
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True}
    return {
        "task": _TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "max_gen_toks": tokens, **sampling},
        "filter_list": [{"name": "last-number", "filter": [pattern, {"function": "take_first"}]}],
        "metric_list": [exact | {"ignore_punctuation": False, "regexes_to_ignore": list(_IGNORED)}],
    }


def _asked(row: dict[str, Any]) -> Asked:
    return Asked(row["arguments"]["gen_args_0"]["arg_0"], row["resps"][0][0], bool(row["exact_match"]))


def versions(interpreter: Path) -> dict[str, str]:
    """The versions of the packages that decide what the harness samples."""
    names = {"lm_eval": "lm-eval", "torch": "harness's torch", "transformers": "harness's transformers"}
    script = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    done = subprocess.run([str(interpreter), "-c", script, *names], capture_output=True, text=True, check=True)
    return dict(zip(names.values(), done.stdout.split(), strict=True))
