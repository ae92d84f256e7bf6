"""A launcher whose worker takes for ever to start: starting_workers.py FOLDER"""

import sys

from nemo_rl_lite.system.machine import close_to_others

close_to_others()

from nemo_rl_lite.cluster.calls import wait  # noqa: E402
from nemo_rl_lite.cluster.runtime import ray_runtime  # noqa: E402
from nemo_rl_lite.cluster.workers import WorkerGroup  # noqa: E402
from tests.functional.conftest import PYTHONPATH  # noqa: E402

try:
    with ray_runtime():
        group = WorkerGroup("policy", [{}], f"{sys.argv[1]}/logs", {"PYTHONPATH": PYTHONPATH})
        wait(group.load("tests.functional.workers.Slow", [{}]))
        wait(group.start([{}]))
except KeyboardInterrupt:
    sys.exit(130)
