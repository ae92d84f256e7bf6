"""Before anything here imports Ray: a call to Ray after the end of a run must not start Ray again."""

import os

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
