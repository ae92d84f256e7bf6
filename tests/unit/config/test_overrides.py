"""What the command line names."""

import pytest

from nemo_rl_lite.config.overrides import named_run_folder


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], None),
        (["algorithm.seed=1"], None),
        (["hydra.run.dir=outputs/a"], "outputs/a"),
        (["++hydra.run.dir=outputs/a"], "outputs/a"),
        (["hydra.run.dir='run folder'"], "run folder"),
        (["hydra.run.dir=a", 'hydra.run.dir="b=c"', "algorithm.seed=1"], "b=c"),
        (["hydra.run.dir=outputs/${run_name}"], "outputs/${run_name}"),
        (["hydra.sweep.dir=outputs/a"], None),
    ],
)
def test_the_runs_folder_as_hydra_reads_it(arguments, folder):
    assert named_run_folder(arguments) == folder
