"""What stands between the command and its first process imports nothing heavy."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["nemo_rl_lite.run.run", "nemo_rl_lite.run.workers.reserve"])
def test_workers_are_started_before_the_launcher_imports_torch(module):
    code = f"import sys, {module}\nprint(*({{'torch', 'transformers', 'matplotlib', 'pandas'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_reasoning_gym_task_is_checked_without_matplotlib():
    code = (
        "import sys\nfrom nemo_rl_lite.data import gym\nassert gym.nearest_task('chain_sum') is None\n"
        "assert gym.draw_entry('game_of_life', {}, 1)['answer']\n"
        "print(*(name for name in sys.modules if name.split('.')[0] in ('matplotlib', 'mpl_toolkits')))\n"
        "from matplotlib import pyplot\npyplot.figure()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_task_of_reasoning_gym_is_checked_without_the_others_which_a_users_code_finds_later():
    code = (
        "import sys\nfrom nemo_rl_lite.data import gym, gym_package\n"
        "assert gym.nearest_task('chain_sum') is None and gym.draw_entry('chain_sum', {}, 1)['answer']\n"
        "print('sympy' in sys.modules, 'numpy' in sys.modules)\n"
        "gym_package.import_whole()\nimport reasoning_gym\n"
        "print(len(reasoning_gym.create_dataset('polynomial_equations', size=2, seed=1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "2"]


def test_a_task_that_is_made_of_others_finds_them():
    code = (
        "from nemo_rl_lite.data import gym\nassert gym.nearest_task('composite') is None\n"
        "from reasoning_gym.factory import DATASETS\nprint('polynomial_equations' in DATASETS)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_command_composes_its_configuration_twice_before_the_run_begins(tmp_path):
    """Once to check it, and once by Hydra, which also makes the folder. Until then nothing heavy is imported."""
    code = (
        "import sys\nfrom hydra._internal.config_loader_impl import ConfigLoaderImpl as Loader\n"
        "composed, whole = [], Loader._load_configuration_impl\n"
        "Loader._load_configuration_impl = lambda *a, **k: composed.append(1) or whole(*a, **k)\n"
        "from nemo_rl_lite.run import command, run\n"
        "def begun(*_):\n"
        "    heavy = {'torch', 'transformers', 'sympy', 'matplotlib'} & sys.modules.keys()\n"
        "    print(len(composed), *heavy)\n    raise SystemExit(0)\n"
        "run.run = begun\ncommand.launch(sys.argv[1:])"
    )
    task = ("data=reasoning_gym", "data.task=chain_sum", "data.validation_fraction=0.1", "reward=last_number")
    arguments = ["recipes=grpo-tiny-1n0g-cpu", *task, f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
    assert (tmp_path / "run").is_dir()
