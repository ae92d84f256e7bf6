"""Starts and stops Ray with the run, and places its workers.

Each GPU is one Ray bundle, which the policy and an engine may share.
"""

import logging
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from nemo_rl_lite.compat.ray import (
    end_broken_node,
    end_processes_behind,
    leave_the_launchers_session,
    start_no_helpers,
    was_slow,
)
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.sizes import all_gpus, generation_gpus, on_gpus, policy_ranks
from nemo_rl_lite.errors import ConfigError, LauncherError, Violation, WorkerError
from nemo_rl_lite.system.machine import OWN_RAY, RAY_ADDRESS, RAY_ADDRESS_FIX, ray_address
from nemo_rl_lite.system.obituary import death_is_reported
from nemo_rl_lite.system.stopping import SIGNALS, interrupt

log = logging.getLogger(__name__)
_POLL_S = 2.0
# Ray's label of a node with its id.
NODE_LABEL = "ray.io/node-id"

# Ray options of one worker's actor.
Slot = dict[str, Any]
# Environment of Ray's processes: no usage report, no idle worker per core.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True)
class Placement:
    """Slots of policy ranks, teacher ranks and generation GPUs. Neighbours share a node if possible."""

    policy: list[Slot]
    teacher: list[Slot]
    generation: list[Slot]


def place(config: Config, engines: int, teacher: bool = False, avoided: Sequence[str] = ()) -> Placement:
    """Reserve the run's GPUs. A teacher shares the GPUs of the policy ranks. `engines`: 0 without generation.
    `avoided`: ids of nodes that are used only if the others have too few GPUs, the last ones least.

    On CPUs nothing is reserved. Ranks are spread over the nodes, and each engine is on the node of the policy rank that
    sends it weights. In a cluster of RAY_ADDRESS, wait for nodes that have not joined yet.

    Raises:
        WorkerError: the cluster lacks GPUs or nodes after `cluster.start_timeout_s`.
    """
    ranks = policy_ranks(config)
    if not on_gpus(config):
        policy = _on_cpus(ranks, config.cluster.num_nodes, config.cluster.start_timeout_s)
        return Placement(policy, policy if teacher else [], [policy[engine % ranks] for engine in range(engines)])
    group = _reserve(all_gpus(config), config.cluster.start_timeout_s, avoided)
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    log.info("bundles by node: %s", nodes)
    nodes = dict(sorted(nodes.items(), key=lambda item: (item[1], item[0])))
    check_nodes(list(nodes.values()), config.cluster.gpus_per_node)
    bundles = list(nodes)
    shared = config.generation.colocated.enabled and engines > 0
    # Ray counts GPUs in steps of 0.0001.
    share = int(10_000 / (1 + shared + teacher)) / 10_000

    def slots(bundles: list[int], share: float) -> list[Slot]:
        on_bundles = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=one) for one in bundles]
        return [{"num_gpus": share, "scheduling_strategy": one} for one in on_bundles]

    policy = slots(bundles[:ranks], share)
    count = generation_gpus(config) if engines else 0
    others = slots(bundles[:count], share) if shared else slots(bundles[ranks : ranks + count], 1.0)
    return Placement(policy, policy if teacher else [], others)


def _on_cpus(ranks: int, nodes: int, limit_s: float) -> list[Slot]:
    if nodes == 1 and "RAY_ADDRESS" not in os.environ:
        return [{}] * ranks
    _wait_for(lambda: len(_alive()), nodes, "nodes (cluster.num_nodes)", limit_s)
    own = ray.get_runtime_context().get_node_id()
    chosen = sorted(_alive(), key=lambda node: (node != own, node))[:nodes]
    on_nodes = [NodeAffinitySchedulingStrategy(node_id=node, soft=False) for node in chosen]
    return [{"scheduling_strategy": on_nodes[rank * nodes // ranks]} for rank in range(ranks)]


def _gpus_by_node() -> dict[str, int]:
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}


def _alive() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _wait_for(there: Callable[[], int], wanted: int, what: str, limit_s: float) -> None:
    """Wait until there are enough nodes or GPUs. Only a cluster of RAY_ADDRESS can grow."""
    limit_s = limit_s if "RAY_ADDRESS" in os.environ else 0
    deadline = time.monotonic() + limit_s
    while (count := there()) < wanted:
        left = deadline - time.monotonic()
        if left <= 0:
            nodes = len(_alive())
            waited = f" after {limit_s:g} s (cluster.start_timeout_s)" if limit_s else ""
            has = f"the Ray cluster has {count} on {nodes} node{'s' if nodes > 1 else ''}{waited}"
            raise WorkerError("placement", "start", f"the run asks for {wanted} {what} and {has}")
        log.info("waiting for %d more %s to join the Ray cluster, at most %.0f s", wanted - count, what, left)
        time.sleep(_POLL_S)


def _reserve(gpus: int, limit_s: float, avoided: Sequence[str]) -> PlacementGroup:
    what = "GPUs (cluster.num_nodes x cluster.gpus_per_node)"
    _wait_for(lambda: sum(_gpus_by_node().values()), gpus, what, limit_s)
    nodes = _gpus_by_node()
    allowed = dict(nodes)
    for node in reversed(avoided):
        if sum(allowed.values()) - allowed.get(node, 0) >= gpus:
            allowed.pop(node, None)
    # Other runs may hold the GPUs of the allowed nodes.
    for chosen in [allowed, nodes] if len(allowed) < len(nodes) else [nodes]:
        selector = {NODE_LABEL: f"in({','.join(chosen)})"}
        group = placement_group([{"GPU": 1}] * gpus, strategy="PACK", bundle_label_selector=[selector] * gpus)
        if group.wait(limit_s):
            return group
        remove_placement_group(group)
    free = ray.available_resources().get("GPU", 0)
    cause = f"{gpus} GPUs did not become free within {limit_s:g} s; only {free:g} are free"
    raise WorkerError("placement", "start", cause)


def check_nodes(nodes: list[str], gpus_per_node: int) -> None:
    """Raise WorkerError if a node does not have `gpus_per_node` GPUs."""
    counts = Counter(nodes)
    if any(count != gpus_per_node for count in counts.values()):
        spread = " + ".join(str(count) for count in counts.values())
        cause = f"cluster.gpus_per_node = {gpus_per_node}, but the free GPUs of the nodes are {spread}"
        raise WorkerError("placement", "start", cause)


@contextmanager
def ray_runtime() -> Iterator[None]:
    """Run Ray on this machine, or join the cluster of RAY_ADDRESS, during the block.

    SIGTERM and SIGUSR1 end the block like Ctrl-C, so that no worker outlives the run.
    """
    previous = {number: signal.signal(number, interrupt) for number in SIGNALS}
    if ray_address() in OWN_RAY and "RAY_AUTH_MODE" not in os.environ:
        log.warning("ray was imported before the run, so other users of this machine can connect to the run's Ray")
    os.environ.update(ENVIRONMENT)
    leave_the_launchers_session()
    start_no_helpers()
    try:
        try:
            _start_or_join()
        except SystemExit:
            # Raised by the SIGTERM handler of ray.init.
            interrupt(signal.SIGTERM, None)
        signal.signal(signal.SIGTERM, interrupt)
        with death_is_reported():
            yield
    finally:
        # A second Ctrl-C must not interrupt the shutdown.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (*SIGNALS, signal.SIGINT)}
        end_broken_node()
        ray.shutdown()
        for number, handler in (handlers | previous).items():
            signal.signal(number, handler)


def _start_or_join() -> None:
    """Start Ray, with a second attempt after a timeout, or join a cluster.

    Raises:
        LauncherError: Ray timed out twice.
        ConfigError: the cluster of RAY_ADDRESS cannot be joined.
    """
    for is_second in (False, True):
        try:
            _init()
            return
        except Exception as error:
            if not was_slow(error):
                raise
            end_processes_behind(error)
            if is_second:
                raise LauncherError(
                    "Ray did not start within its time limit, twice: the machine is overloaded. Try again with less "
                    f"load, or start Ray before the run (ray start --head) and set {RAY_ADDRESS}=auto"
                ) from error
        log.warning("Ray did not start within its time limit; trying once more")
        ray.shutdown()


def _init() -> None:
    address = ray_address() or "local"
    try:
        ray.init(
            # Otherwise Ray joins the cluster that was last started on this machine.
            address=address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if "AF_UNIX path" in str(error):
            folder, rule = tempfile.gettempdir(), "is too long for the names of Ray's sockets"
            raise ConfigError(
                [Violation("TMPDIR", folder, rule, "RAY_TMPDIR=/tmp, or another short folder")]
            ) from error
        if address in OWN_RAY:
            raise
        cause = " ".join(str(error).split())
        raise ConfigError([Violation(RAY_ADDRESS, address, f"cannot be joined: {cause}", RAY_ADDRESS_FIX)]) from error


def available_cores() -> int:
    return len(os.sched_getaffinity(0))
