"""Ray: how its processes start and end, and its key-value store."""

import os
import traceback
from collections.abc import Mapping
from typing import Any

import ray

# The key-value store of Ray's control service.
from ray.experimental.internal_kv import _internal_kv_del as kv_del  # noqa: F401
from ray.experimental.internal_kv import _internal_kv_get as kv_get  # noqa: F401
from ray.experimental.internal_kv import _internal_kv_put as kv_put  # noqa: F401

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "ray", "2.56")

# In the bare Exception that Ray raises when its processes time out.
_TIMED_OUT = "timed out during startup"
_NEEDED = ("gcs_server", "raylet")


def was_slow(error: Exception) -> bool:
    """Return whether `ray.init` raised this error because Ray's processes timed out."""
    return _TIMED_OUT in str(error)


def end_processes_behind(error: Exception) -> None:
    """End the processes of a node that did not start, to which Ray keeps no reference."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, ray._private.node.Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


def lost_process() -> str:
    """Return the name of a Ray process that has ended but is needed, or ""."""
    node = ray._private.worker._global_node
    processes: Mapping[str, Any] = node.all_processes if node is not None else {}
    ended = (kind for kind, infos in processes.items() if any(info.process.poll() is not None for info in infos))
    return next((f"Ray's {kind}" for kind in ended if kind in _NEEDED), "")


def end_broken_node() -> None:
    """End Ray's processes if one is lost, as the others would wait a minute for it."""
    node = ray._private.worker._global_node
    if node is not None and lost_process():
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def leave_the_launchers_session() -> None:
    """Start each Ray process in its own session.

    Otherwise a signal to the launcher's process group (`timeout`, Slurm, systemd) ends Ray before the run has saved.
    """
    utils = ray._private.utils
    if getattr(utils.set_kill_on_parent_death_linux, "leaves_session", False):
        return
    end_with_parent = utils.set_kill_on_parent_death_linux

    def in_child() -> None:
        os.setsid()
        end_with_parent()

    in_child.leaves_session = True  # pyrefly: ignore
    # Ray calls this function between fork and exec.
    utils.set_kill_on_parent_death_linux = in_child


def start_no_helpers() -> None:
    """Make `ray.init` skip helper processes: API server (dashboard), log monitor and autoscaler monitor.

    Each takes a second of CPU time while workers import, and `ray.init` has no option to skip them.
    """

    def start_none(node: Any, **_: Any) -> None:
        node._webui_url = ""

    node = ray._private.node.Node
    node.start_api_server = node.start_log_monitor = node.start_monitor = start_none  # pyrefly: ignore
