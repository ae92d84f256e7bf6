"""Checks Ray, ports and addresses, and services outside this machine. No secret is shown or sent."""

import netrc
import os
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from nemo_rl_lite.diagnosis.check import EVERY_RUN, FAIL, OK, WARN, Check, Machine, judge
from nemo_rl_lite.diagnosis.host import ray_folder
from nemo_rl_lite.host.machine import (
    LASTING_PORTS,
    RAY_ADDRESS,
    RAY_ADDRESS_FIX,
    WANDB,
    names_another,
    ray_address,
    wandb_login,
    why_unanswered,
)

ANSWER_LIMIT_S = 4.0
# The longest path of a socket, and the longest that Ray appends to its folder.
LONGEST_PATH = 107
SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_TRIED_PORTS = 40


def running_ray(machine: Machine) -> Iterator[Check]:
    """Check for another Ray on this machine: a run does not join it, but it takes memory and ports."""
    import psutil

    nodes = [str(process.pid) for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet"]
    found = f"{len(nodes)} running (raylet {', '.join(nodes)})" if nodes else "none running; each run starts its own"
    yield judge("Ray", not nodes, found, "", "if no other run needs it: ray stop", "the memory and CPUs that it has")


def cluster_address(machine: Machine) -> Iterator[Check]:
    """Check the cluster that RAY_ADDRESS makes a run join."""
    address = ray_address()
    if not names_another(address):
        yield Check(RAY_ADDRESS, OK, address or "not set: a run starts its own Ray on this machine")
        return
    trouble = why_unanswered(address)
    found = f"{address} {trouble or 'answers: runs join that cluster'}"
    yield judge(RAY_ADDRESS, not trouble, found, "HOST:PORT", RAY_ADDRESS_FIX, EVERY_RUN, FAIL)


def socket_paths(machine: Machine) -> Iterator[Check]:
    """Check that the paths of Ray's sockets are not too long."""
    length = len(os.fsencode(ray_folder() / SOCKET))
    found, fix = f"sockets in {ray_folder()} have paths of {length} bytes", "RAY_TMPDIR=/tmp, or another short folder"
    yield judge("Ray's folder", length <= LONGEST_PATH, found, f"at most {LONGEST_PATH}", fix, EVERY_RUN, FAIL)


def ports(machine: Machine) -> Iterator[Check]:
    """Check that ranks can listen on the ports at which they meet, and that the kernel uses others."""
    span = f"{LASTING_PORTS.start}-{LASTING_PORTS.stop - 1}"
    free = sum(map(is_free, random.sample(LASTING_PORTS, _TRIED_PORTS)))
    found, fix = f"{free} of {_TRIED_PORTS} tried in {span} are free", f"allow processes here to listen on {span}"
    yield judge("ports", free > 0, found, span, fix, EVERY_RUN, FAIL)
    with suppress(OSError, ValueError):
        setting = machine.system / "proc/sys/net/ipv4/ip_local_port_range"
        first, last = map(int, setting.read_text().split())
        apart = first >= LASTING_PORTS.stop or last < LASTING_PORTS.start
        fix, off = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'", "starts: another process may take their port"
        yield judge("outgoing ports", apart, f"{first}-{last}", f"none of {span}, which runs use", fix, off)


def is_free(port: int) -> bool:
    """Whether this process can listen on the port."""
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def host_name(machine: Machine) -> Iterator[Check]:
    """Check that the machine's own name has an address, which gloo and Ray look up."""
    name = socket.gethostname()
    try:
        yield Check("host name", OK, f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        fix, off = f"a line '127.0.0.1 {name}' in /etc/hosts", "gloo between ranks, unless its interface is set"
        yield Check("host name", WARN, f"{name} has no address: {error.strerror}", fix=fix, off=off)


def hub(machine: Machine) -> Iterator[Check]:
    """Check that the Hugging Face hub answers, and whether there is a token for it."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    trouble = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else unreachable(ENDPOINT)
    found = f"{ENDPOINT} cannot be reached: {trouble}" if trouble else f"{ENDPOINT} answers"
    found += "; a token is there" if get_token() else "; no token, which only gated and private models need"
    fix = "a network or proxy (HTTPS_PROXY), a mirror (HF_ENDPOINT), or policy.model_name=./FOLDER"
    off = "models and datasets by their hub names; local folders, files and what is in the cache work"
    yield judge("hub", not trouble, found, "", fix, off)


def unreachable(address: str) -> str:
    """Why a server does not answer; empty where it gives any answer."""
    try:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "nemo_rl_lite doctor"})
        urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(error.reason if isinstance(error, urllib.error.URLError) else error)
    return ""


def wandb(machine: Machine) -> Iterator[Check]:
    """Check whether W&B would find a key."""
    address = os.environ.get("WANDB_BASE_URL") or WANDB
    try:
        source = wandb_login(os.environ, address)
        found = f"a key for {urlsplit(address).netloc} is in {source}" if source else "not logged in"
    except (OSError, netrc.NetrcParseError) as error:
        # The error of the parser shows the text of the file, which has keys in it.
        source, why = "", f"malformed at line {error.lineno}" if isinstance(error, netrc.NetrcParseError) else error
        found = f"the netrc file cannot be read: {why}"
    off = "logger.wandb_enabled; logger.wandb.mode=offline works, and so do metrics.jsonl and TensorBoard"
    yield judge("W&B", bool(source), found, "", "wandb login, or WANDB_API_KEY", off)


CHECKS = {"cluster": (running_ray, cluster_address, socket_paths, ports, host_name), "services": (hub, wandb)}
