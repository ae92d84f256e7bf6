"""Ray: how its processes start and end, and its key-value store."""

import os
import traceback
from collections.abc import Mapping
from typing import Any

import ray

# The key-value store of Ray's control service.
from ray.experimental.internal_kv import _internal_kv_get as kv_get  # noqa: F401
from ray.experimental.internal_kv import _internal_kv_put as kv_put  # noqa: F401

from nemo_rl_lite.compat.versions import written_for

written_for("ray", "2.56", __name__)

# Ray raises a bare Exception with this where its own processes take longer than its limits.
_TIMED_OUT = "timed out during startup"
_NEEDED = ("gcs_server", "raylet")


def was_slow(error: Exception) -> bool:
    """Return whether `ray.init` has raised this because Ray's processes took too long to start."""
    return _TIMED_OUT in str(error)


def end_processes_behind(error: Exception) -> None:
    """End the processes of a node that did not start.

    Ray keeps no reference to the node, so they would run as long as the launcher.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, ray._private.node.Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


def lost_process() -> str:
    """Return a needed Ray process that has ended, of the Ray that this process started; empty while all run."""
    node = ray._private.worker._global_node
    processes: Mapping[str, Any] = node.all_processes if node is not None else {}
    ended = (kind for kind, infos in processes.items() if any(info.process.poll() is not None for info in infos))
    return next((f"Ray's {kind}" for kind in ended if kind in _NEEDED), "")


def end_broken_node() -> None:
    """End Ray's processes if one is lost: the others would wait for it, for a minute."""
    node = ray._private.worker._global_node
    if node is not None and lost_process():
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def leave_the_launchers_session() -> None:
    """Start each Ray process in its own session.

    A signal to the launcher's process group (from `timeout`, Slurm, systemd, a container that closes) would
    otherwise end Ray before the run has saved.
    """
    utils = ray._private.utils
    if getattr(utils.set_kill_on_parent_death_linux, "leaves_session", False):
        return
    end_with_parent = utils.set_kill_on_parent_death_linux

    def in_child() -> None:
        os.setsid()
        end_with_parent()

    in_child.leaves_session = True  # pyrefly: ignore
    # Ray calls this between fork and exec, and has no option for it.
    utils.set_kill_on_parent_death_linux = in_child


def start_no_helpers() -> None:
    """Make `ray.init` start none of the helper processes that a run does not use.

    The API server serves the dashboard and usage reports, which are off here; `ray.init` waits for it. The log monitor
    copies workers' output to the driver, and workers write to their own logs. The monitor starts machines. Each takes a
    second of CPU time while workers import, and `ray.init` has no option that leaves them out.
    """

    def start_none(node: Any, **_: Any) -> None:
        node._webui_url = ""

    node = ray._private.node.Node
    node.start_api_server = node.start_log_monitor = node.start_monitor = start_none  # pyrefly: ignore
