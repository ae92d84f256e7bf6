"""A Slurm of the test's own: real slurmctld, slurmd and munge, two nodes on this machine, everything in one folder."""

import os
import pwd
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.functional.ranks import reserved_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
# Where Debian puts daemons.
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
NODES = 2
USER = pwd.getpwuid(os.getuid()).pw_name
# Jobs that are queued again start without the usual delays; `low` is for those that give way to others.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType={tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=10
MpiDefault=none
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_node}-{last_node}] CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=2
PartitionName=low Nodes=ALL State=UP PriorityTier=1 GraceTime=60
"""


def has_cgroups() -> bool:
    """Whether Slurm can keep a task and what the task starts apart here, as it does on clusters."""
    return os.access("/sys/fs/cgroup/freezer", os.W_OK)


def missing() -> list[str]:
    """What of Slurm is not installed here."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


@dataclass
class Site:
    """Up after `start`, gone after `stop`."""

    folder: Path
    _daemons: list[subprocess.Popen] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ) | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def start(self) -> None:
        with reserved_ports() as port:
            self._start(port)

    def _start(self, port: int) -> None:
        munge = self.folder / "munge"
        for name in ("munge", "state", *(f"spool-n{node}" for node in range(NODES))):
            (self.folder / name).mkdir(mode=0o700)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "slurm.conf").write_text(
            CONFIG.format(
                host=socket.gethostname().partition(".")[0],
                folder=self.folder,
                tracking="proctrack/cgroup" if has_cgroups() else "proctrack/pgid",
                user=USER,
                port=port,
                last=NODES - 1,
                first_node=port + 1,
                last_node=port + NODES,
            )
        )
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in files.items()))
        self._until(lambda: (munge / "socket").exists(), 10)
        self._daemon("slurmctld", "-D")
        for node in range(NODES):
            self._daemon("slurmd", "-D", "-N", f"n{node}")
        self.rest()

    def rest(self) -> None:
        """Wait until no node has a job, or is about to lose one."""
        nodes = ("scontrol", "show", "nodes", "--oneliner")
        self._until(lambda: len(re.findall(r"State=IDLE\s", self.ask(*nodes, check=False))) == NODES, 90)

    def stop(self) -> None:
        if self._daemons:
            self.ask("scancel", f"--user={USER}", check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        assert not (check and done.returncode), done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        return self.ask("squeue", "--noheader", "--states=all", f"--job={job}", "--format=%T").strip()

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self._daemons)}.out").open("w") as output:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=output, stderr=subprocess.STDOUT)
            )

    def _until(self, done, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            said = "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in self.folder.glob("*.out"))
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
