"""`nrl-lite init [FOLDER]`: write an example experiment, reward and rows, which train on a CPU."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

FILES = {
    "experiment.yaml": """\
# Your experiment: nrl-lite train experiment.yaml [key.path=value ...]
# Keys and their defaults: nrl-lite keys WORD, or docs/configuration.md. Paths are relative to the folder in which
# you run the command. Files of the defaults list are next to this file.
defaults:
  # Files of groups. To start from a recipe, add a line such as - grpo-smollm2-135m-1n1g
  - algorithm: grpo
  - data: file

run_name: my-experiment

policy:
  # The embedded model of 0.8 M parameters trains on a CPU. Yours: a folder or a Hub model ID.
  model_name: embedded:reverse-digits
  train_global_batch_size: 8

data:
  # Rows with `prompt` and `answer`; other columns reach the reward as problem.metadata.
  train_path: rows.jsonl
  validation_fraction: 0.2

reward:
  # def score(response, answer) -> float
  name: reward.py:score

algorithm:
  max_num_steps: 2
  num_prompts_per_step: 2
  num_generations_per_prompt: 4

checkpoint:
  # Steps between checkpoints; 0 saves none.
  save_period: 0
""",
    "reward.py": '''\
"""The reward of experiment.yaml."""


def score(response: str, answer: str) -> float:
    """Return the share of the answer's digits at the right place."""
    right = sum(a == b for a, b in zip(response.strip(), answer, strict=False))
    return right / max(len(answer), len(response.strip()))
''',
    "rows.jsonl": "".join(
        f'{{"prompt": "{digits}", "answer": "{digits[::-1]}"}}\n' for digits in ("1234", "9071", "5586", "2049", "7713")
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="nrl-lite init", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="where to write (default: here)")
    folder = parser.parse_args(arguments).folder.expanduser()
    if there := [name for name in FILES if (folder / name).exists()]:
        parser.error(f"{folder / there[0]} exists already: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            (folder / name).write_text(text)
    except OSError as error:
        parser.error(f"{folder}: {error.strerror}")
    sys.stdout.write(f"wrote {', '.join(FILES)} in {folder.absolute()}\n")
    change = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    sys.stdout.write(f"next: {change}nrl-lite train experiment.yaml\n")


if __name__ == "__main__":
    main()
