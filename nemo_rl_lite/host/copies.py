"""Whether another launcher (torchrun, accelerate, srun, mpirun) starts this command once for each worker.

Imports nothing heavy.
"""

import os
from collections.abc import Mapping

from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.host.ray_address import OWN, VARIABLE

# torchrun and accelerate set all of these in each process that they start.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# The number of tasks of one srun (SLURM_NTASKS is the job's, and a batch script has that as well), and of one mpirun.
_COUNTS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun"}
_RULE = "starts this command once for each worker, and one launcher starts all of its workers itself"


def check_single_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where this process is one of several copies of the command.

    A command that joins a running Ray may stand in one of the tasks that started it.
    """
    if environ.get(VARIABLE, "") not in OWN:
        return
    counts = dict(_COUNTS)
    if all(name in environ for name in _OF_TORCHRUN):
        counts["WORLD_SIZE"] = "torchrun or accelerate"
    if environ.get("SLURM_PROCID", "0") != "0":
        counts["SLURM_NTASKS"] = "srun"
    for name, starter in counts.items():
        count = environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            fix = f"nrl-lite train ... without {starter}; on several nodes: nrl-lite slurm, or unset {name}"
            raise ConfigError([Violation(name, count, f"{starter} {_RULE}", fix)])
