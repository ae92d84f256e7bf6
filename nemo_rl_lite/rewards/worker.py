"""This module is a judging process: `pool.py` starts `python -m nemo_rl_lite.rewards.worker PIPE`."""

import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection

from nemo_rl_lite.rewards.registry import error_text, find_reward


def main() -> None:
    """Answer `(response, problem)` with a reward, or with an error's text, until the pipe is closed."""
    # Ctrl-C ends the launcher, and the launcher's end closes the pipe, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    sys.path[:], name, kwargs, timeout_s = pipe.recv()
    reward = find_reward(name, kwargs)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        while True:
            try:
                response, problem = pipe.recv()
            except EOFError:
                return
            # This is the only timer that can end the process without the interpreter; it needs a file to write to.
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=nowhere)
            try:
                verdict = reward(response, problem)
            except Exception as error:  # a user's function may raise anything
                verdict = error_text(error)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(verdict)


if __name__ == "__main__":
    main()
