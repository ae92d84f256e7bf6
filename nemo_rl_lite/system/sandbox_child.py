"""The process of `sandbox.run_python`: it limits itself, and then is the code. It imports nothing of this package."""

import ctypes
import json
import math
import os
import resource
import sys
import traceback
from types import TracebackType

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _KILL = 1, 9


def limit(asked: dict) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, _KILL, 0, 0, 0)
    # Without privileges a network of its own needs users of its own; where neither is allowed, the network stays.
    libc.unshare(_NEW_USER | _NEW_NETWORK)
    seconds = math.ceil(asked["seconds"])
    most = {
        resource.RLIMIT_AS: asked["memory"],
        resource.RLIMIT_FSIZE: max(asked["output"], 2**24),
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in most.items():
        resource.setrlimit(kind, (value, value))
    # The first limit ends the code with SIGXCPU, which says why; the second is for code that ignores that.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that ends the code, without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def main() -> None:
    told, says = map(int, sys.argv[1:])
    with os.fdopen(told) as given:
        asked = json.loads(given.read())
    limit(asked)
    sys.argv, names = ["<code>"], {"__name__": "__main__"}
    sys.excepthook = show
    for code in asked["codes"]:
        exec(compile(code, "<code>", "exec"), names)  # noqa: S102 (what this process is for)
    sys.stdout.flush()
    os.write(says, asked["word"].encode())


if __name__ == "__main__":
    main()
