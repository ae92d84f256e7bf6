"""What stands between the command and its first process imports nothing heavy."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["nemo_rl_lite.run.run", "nemo_rl_lite.workers.reserve"])
def test_workers_are_started_before_the_launcher_imports_torch(module):
    code = f"import sys, {module}\nprint(*({{'torch', 'transformers', 'matplotlib', 'pandas'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_nothing_heavy_is_imported_before_the_run_begins(tmp_path):
    code = (
        "import sys\nfrom nemo_rl_lite.run import command, run\n"
        "def begun(*_):\n"
        "    heavy = {'torch', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
        "    print('begun', *heavy)\n    raise SystemExit(0)\n"
        "run.run = begun\ncommand.launch(sys.argv[1:])"
    )
    arguments = ["recipes=grpo-tiny-1n0g-cpu", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["begun"]
    assert (tmp_path / "run").is_dir()
