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
