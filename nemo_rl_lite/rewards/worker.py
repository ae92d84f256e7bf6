"""This module is a judging process: `pool.py` starts `python -m nemo_rl_lite.rewards.worker PIPE`."""

import ctypes
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil

from nemo_rl_lite.rewards.registry import RewardError, error_text, find_reward

_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Judge until the pipe is closed. The launcher's end ends this process, whatever a reward may have left."""
    # What a reward starts, and its children leave, stays below this process, which ends it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    with suppress(EOFError, OSError):
        _judge(pipe)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()


def _judge(pipe: Connection) -> None:
    """Say None once the reward is imported, then answer each `(response, problem)` with a reward or a `RewardError`."""
    own = os.getpid()
    sys.path[:], name, kwargs = pipe.recv()
    reward = find_reward(name, kwargs)
    pipe.send(None)
    while True:
        response, problem = pipe.recv()
        try:
            verdict = reward(response, problem)
        except RewardError as error:
            verdict = error
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            verdict = RewardError(error_text(error))
        if os.getpid() != own:
            # A reward has forked, and this is the copy.
            os._exit(0)
        pipe.send(verdict)


if __name__ == "__main__":
    main()
