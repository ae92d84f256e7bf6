"""docs/troubleshooting.md quotes messages that exist, and names keys that exist."""

import ast
import mmap
import re
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest

from nemo_rl_lite.config.keys import is_open, known_keys
from nemo_rl_lite.errors import RunStopped

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# **`message`**, and (package) behind it where it is not the launcher's.
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*(?: \((\w[\w&]*)[^)]*\))?", PAGE)
# The files that others' messages are in, by the name in the page.
ELSEWHERE = {
    "vLLM": ("vllm/v1/core/kv_cache_utils.py", "vllm/v1/worker/utils.py"),
    "Triton": ("triton/runtime/build.py",),
    "Ray": ("ray/_private/utils.py",),
    "torch": ("torch/lib/libc10_cuda.so", "torch/lib/libtorch_cpu.so"),
    "NCCL": ("nvidia/nccl/lib/libnccl.so.2", "torch/lib/libtorch_cuda.so"),
    "status": (),
}
SECTIONS = "algorithm|policy|generation|offload|refit|data|reward|environment|cluster|logger|checkpoint"


@cache
def own_messages() -> str:
    """Every text of the launcher's sources, but for docstrings, on a separate line; what is put into it is a NUL."""
    texts = (ROOT / "scripts" / "install.sh").read_text().splitlines()
    for file in (ROOT / "nemo_rl_lite").rglob("*.py"):
        # The doctor's words are not what users search for.
        if "diagnosis" not in file.parts:
            tree = list(ast.walk(ast.parse(file.read_text())))
            docstrings = {node.value for node in tree if isinstance(node, ast.Expr)}
            texts += [_text(node) for node in tree if _is_text(node) and node not in docstrings]
    return "\n".join(text.replace("\n", " ") for text in texts)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    return re.sub(r"%[-.\d]*[srdfgx]", "\0", str(node.value))  # pyrefly: ignore[missing-attribute]


def is_own(message: str) -> bool:
    """Whether a text of the launcher's has the message: its `...` is something put in, or the rest of the text."""
    parts = [re.escape(part) for part in message.split("...")]
    return re.search("[^\n]*?".join(parts), own_messages()) is not None


def is_elsewhere(message: str, package: str) -> bool:
    parts = [part.strip() for part in message.split("...")]
    places = [Path(str(distribution("torch").locate_file(name))) for name in ELSEWHERE[package]]
    return any(all(_contains(place, part.encode()) for part in parts if part) for place in places if place.exists())


def _contains(file: Path, text: bytes) -> bool:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def test_there_are_many():
    assert len(QUOTED) > 60
    assert {package for _, package in QUOTED} == {"", *ELSEWHERE}


@pytest.mark.parametrize(("message", "package"), QUOTED, ids=lambda value: value[:40])
def test_a_quoted_message_exists(message, package):
    assert max(map(len, message.split("..."))) >= 8, "too short to be searched for"
    if package in ("", "status"):
        assert is_own(message), f"no text in nemo_rl_lite/ or scripts/install.sh is like: {message}"
    else:
        assert is_elsewhere(message, package), f"{package} has no such message: {message}"


def test_what_does_not_exist_is_found():
    assert is_own("worker error: ... failed in phase '...': ...")
    assert not is_own("worker error: ... failed in the phase '...': ...")
    assert not is_own("configuration error: found ...")
    # A docstring of errors.py.
    assert not is_own("Everything wrong with a configuration, at once")
    assert not is_elsewhere("No available memory for the cash blocks", "vLLM")


def test_keys_exist():
    named = set(re.findall(rf"\b((?:{SECTIONS})\.[a-z_]\w*(?:\.[a-z_]\w*)*)", "\n".join(re.findall("`[^`\n]+`", PAGE))))
    keys = set(known_keys())
    assert len(named) > 20
    files = {name for name in named if name.endswith((".md", ".txt", ".jsonl", ".log", ".json", ".sh"))}
    assert {name for name in named - files if name not in keys and not is_open(name)} == set()


def test_statuses_are_the_launchers():
    assert f"| {RunStopped.exit_status} | stopped early" in PAGE
