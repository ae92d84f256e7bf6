"""Everything there is to say of this machine, in the order in which it is shown."""

import os
from pathlib import Path

from nemo_rl_lite.diagnosis import cluster, gpus, host, packages, services
from nemo_rl_lite.diagnosis.check import Finding, Machine, examine, gather
from nemo_rl_lite.diagnosis.smi import GpuAnswer, read_gpus

LIMIT_S = 20.0
IMPORTS_LIMIT_S = 600.0


def diagnose(with_imports: bool) -> list[Finding]:
    """Look at this machine, its Python environment and the current folder, for some `LIMIT_S` seconds at most; and,
    where that is asked for, import what a run's processes import."""
    hangs = GpuAnswer(trouble=f"nvidia-smi gave no answer within {LIMIT_S:g} s")
    machine = Machine(
        gpus=gather(read_gpus, LIMIT_S, hangs),
        environment=dict(os.environ),
        folder=Path.cwd(),
        kind=packages.environment_kind(),
    )
    subjects = (packages, gpus, host, cluster, services)
    findings = examine(machine, [one for subject in subjects for one in subject.EXAMINATIONS], LIMIT_S)
    if with_imports:
        findings += examine(machine, packages.IMPORT_EXAMINATIONS, IMPORTS_LIMIT_S)
    return findings
