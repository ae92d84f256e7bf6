"""What stands between the command and its first process imports nothing heavy."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["nemo_rl_lite.run.run", "nemo_rl_lite.run.workers.reserve"])
def test_workers_are_started_before_the_launcher_imports_torch(module):
    code = f"import sys, {module}\nprint(*({{'torch', 'transformers', 'matplotlib', 'pandas'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_command_composes_its_configuration_twice_before_the_run_begins(tmp_path):
    """Once to check it, and once by Hydra, which also makes the folder. Until then nothing heavy is imported."""
    code = (
        "import sys\nfrom hydra._internal.config_loader_impl import ConfigLoaderImpl as Loader\n"
        "composed, whole = [], Loader._load_configuration_impl\n"
        "Loader._load_configuration_impl = lambda *a, **k: composed.append(1) or whole(*a, **k)\n"
        "from nemo_rl_lite.run import command, run\n"
        "def begun(*_):\n"
        "    heavy = {'torch', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
        "    print(len(composed), *heavy)\n    raise SystemExit(0)\n"
        "run.run = begun\ncommand.launch(sys.argv[1:])"
    )
    arguments = ["recipes=grpo-tiny-1n0g-cpu", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
    assert (tmp_path / "run").is_dir()
