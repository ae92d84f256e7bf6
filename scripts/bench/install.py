"""Minutes and gigabytes of `scripts/install.sh` in a new folder: install.py [cpu|gpu]

Installs the checkout's tracked files twice in a temporary folder: first with empty caches of its own, then once more
without .venv, with what the first one kept. PATH has no CUDA toolkit.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import record

GIB = 2**30
TARGET_MINUTES = 30
IMPORTS = ("torch", "ray", "vllm", "transformer_engine.pytorch", "megatron.core", "megatron.bridge")


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "gpu"
    results, minutes = [], []
    with tempfile.TemporaryDirectory(dir=record.ROOT.parent) as name:
        checkout = Path(name) / "checkout"
        subprocess.run(["git", "clone", "--quiet", str(record.ROOT), str(checkout)], check=True)
        home = Path(name) / "home"
        home.mkdir()
        for round_name in ("first", "second"):
            shutil.rmtree(checkout / ".venv", ignore_errors=True)
            seconds, taken, log = install(checkout, home, kind)
            minutes.append(seconds / 60)
            config = f"{kind}, {round_name} install"
            results.append(record.result("whole install", config, "min", [seconds / 60]))
            results.append(record.result("disk taken at most", config, "GiB", [taken / GIB]))
            for title, step in re.findall(r"^install: (.+?) [ .\[\]/\d]*?(\d+) s$", log, re.M):
                results.append(record.result(title, config, "s", [float(step)]))
        results.append(record.result(".venv", kind, "GiB", [size_of(checkout / ".venv") / GIB]))
        kept = home / "cache" / "nemo_rl_lite"
        results.append(record.result("what is kept for the next install", kind, "GiB", [size_of(kept) / GIB]))
        imported = sum(imports(checkout / ".venv", module) for module in IMPORTS)
        results.append(record.result(f"imported of {', '.join(IMPORTS)}", kind, "", [imported]))
    bars = [
        record.bar("minutes of the first install", minutes[0], TARGET_MINUTES, at_least=False),
        record.bar("modules that are imported", imported, len(IMPORTS) if kind == "gpu" else 5, at_least=True),
    ]
    print(f"wrote {record.write(f'install-{kind}', results, bars)}")


def install(checkout: Path, home: Path, kind: str) -> tuple[float, int, str]:
    """Return the seconds, the bytes by which the disk's free space shrank at most, and the output."""
    environment = os.environ | {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYENV_ROOT": os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv")),
    }
    environment.pop("CUDA_HOME", None)
    free, least, done = shutil.disk_usage(checkout).free, [], threading.Event()

    def watch() -> None:
        while not done.wait(1):
            least.append(shutil.disk_usage(checkout).free)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.monotonic()
    command = ["bash", "scripts/install.sh", kind]
    output = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.monotonic() - started
    done.set()
    watcher.join()
    print(output.stdout, flush=True)
    return seconds, free - min(least, default=free), output.stdout


def size_of(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_blocks * 512 for path in files)


def imports(venv: Path, module: str) -> bool:
    command = [str(venv / "bin" / "python"), "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
