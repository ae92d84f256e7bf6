"""What `nvidia-smi` tells: it comes with the driver, so it is there wherever a GPU can be used."""

import csv
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

COMMAND = "nvidia-smi"
LIMIT_S = 10.0
# Drivers before 510 do not know the last one.
_FIELDS = ("index", "uuid", "name", "pci.bus_id", "driver_version", "memory.total", "memory.used", "compute_mode")
_CAPABILITY = "compute_cap"
_PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")


class NoAnswerError(Exception):
    """nvidia-smi is not there, failed, or did not answer: why."""


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    bus_id: str
    """PCI address as sysfs writes it, `0000:3b:00.0`."""
    driver: str
    total_mib: int
    used_mib: int
    compute_mode: str
    """Default, Exclusive_Process or Prohibited."""
    capability: tuple[int, int] | None
    """Compute capability; None where the driver does not tell."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that has memory of a GPU."""

    uuid: str
    pid: str
    name: str
    memory: str
    """MiB, or `[N/A]` where the driver does not tell."""


@dataclass(frozen=True)
class GpuAnswer:
    """All that it tells. Without GPUs, `trouble` is nvidia-smi's reason; empty where there is no nvidia-smi."""

    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """For each pair of GPUs, the lower index first: NV# (so many NVLinks), PIX, PXB, PHB, NODE or SYS."""
    trouble: str = ""


def read_gpus(command: str = COMMAND, limit_s: float = LIMIT_S) -> GpuAnswer:
    """Ask `command`. Never raises on what it answers; no single question takes longer than `limit_s`."""
    try:
        gpus = _ask_for_gpus(command, limit_s)
    except FileNotFoundError:
        return GpuAnswer()
    except NoAnswerError as error:
        return GpuAnswer(trouble=str(error))
    apps = [f"--query-compute-apps={','.join(_PROCESS_FIELDS)}", "--format=csv,noheader,nounits"]
    return GpuAnswer(
        gpus,
        parse_processes(_ask_beside(command, apps, limit_s)),
        parse_links(_ask_beside(command, ["topo", "-m"], limit_s)) if len(gpus) > 1 else {},
    )


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Rows of `--query-gpu`, with or without a last column for the compute capability.

    Raises:
        NoAnswerError: they are something else.
    """
    try:
        return tuple(_gpu(row) for row in csv.reader(text.splitlines(), skipinitialspace=True) if row)
    except (ValueError, IndexError):
        raise NoAnswerError(f"nvidia-smi gave an answer that is not understood: {_first_line(text)}") from None


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """Rows of `--query-compute-apps`; a name may have commas of its own."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) >= len(_PROCESS_FIELDS)]
    return tuple(GpuProcess(row[0], row[1], ", ".join(row[2:-1]), row[-1]) for row in rows)


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """The matrix of `topo -m`. Its columns begin with the GPUs; behind them are network cards and CPU affinities."""
    links: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in _ESCAPES.sub("", text).splitlines():
        cells = line.split()
        if not columns:
            columns = [int(found[1]) for cell in cells if (found := _GPU.fullmatch(cell))]
        elif cells and (row := _GPU.fullmatch(cells[0])):
            links |= {(int(row[1]), column): link for column, link in zip(columns, cells[1:], strict=False)}
    return {pair: links[pair] for pair in combinations(sorted(columns), 2) if pair in links}


def sysfs_address(bus_id: str) -> str:
    """A PCI address as sysfs writes it: nvidia-smi's has a domain of eight digits, and capital letters."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _gpu(row: list[str]) -> Gpu:
    index, uuid, name, bus_id, driver, total, used, mode = row[: len(_FIELDS)]
    # Integrated GPUs have no memory of their own, and say [N/A].
    sizes = [int(size) if size.isdigit() else 0 for size in (total, used)]
    capability = row[len(_FIELDS)] if len(row) > len(_FIELDS) else ""
    major, _, minor = capability.partition(".")
    known = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    return Gpu(int(index), uuid, name, sysfs_address(bus_id), driver, sizes[0], sizes[1], mode, known)


def _ask_for_gpus(command: str, limit_s: float) -> tuple[Gpu, ...]:
    query = f"--query-gpu={','.join(_FIELDS)}"
    try:
        return parse_gpus(_ask(command, [f"{query},{_CAPABILITY}", "--format=csv,noheader,nounits"], limit_s))
    except NoAnswerError as error:
        if _CAPABILITY not in str(error):
            raise
        return parse_gpus(_ask(command, [query, "--format=csv,noheader,nounits"], limit_s))


def _ask_beside(command: str, arguments: list[str], limit_s: float) -> str:
    """An answer that may be missing: some virtual machines and containers refuse these."""
    try:
        return _ask(command, arguments, limit_s)
    except NoAnswerError:
        return ""


def _ask(command: str, arguments: list[str], limit_s: float) -> str:
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"nvidia-smi gave no answer within {limit_s:g} s") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NoAnswerError(f"nvidia-smi could not be run: {error}") from None
    if done.returncode or done.stdout.startswith("No devices were found"):
        raise NoAnswerError(_first_line(done.stdout + done.stderr) or f"nvidia-smi ended with {done.returncode}")
    return done.stdout


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
