"""Settings for Ray, set before it is imported: a call to Ray after a run's end must not start it again."""

import os

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
