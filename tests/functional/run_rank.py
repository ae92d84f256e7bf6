"""One rank of whole runs without Ray: run_rank.py MODEL_FOLDER OUTPUT_FOLDER RUNS, a JSON object of overrides by name.

The launcher is in rank 0's process, and so are the first policy rank and the first engine. Every other process may
serve a policy rank and an engine. Each run has a folder of OUTPUT_FOLDER.
"""

import json
import os
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread

from tests.functional.here import GroupHere, serve, train_here

GROUPS = ("generation", "policy")


def main(model_folder: str, output_folder: str, runs: str) -> None:
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] != "0":
        engine, policy = (connect(address, group) for group in GROUPS)
        Thread(target=serve, args=(engine,), daemon=True).start()
        serve(policy)
        return
    with Listener(address, backlog=8) as listener:
        others = [listener.accept() for _ in range(len(GROUPS) * (int(os.environ["WORLD_SIZE"]) - 1))]
    groups = [connection.recv() for connection in others]
    GroupHere.peers = {
        name: [peer for peer, group in zip(others, groups, strict=True) if group == name] for name in GROUPS
    }
    for name, overrides in json.loads(runs).items():
        train_here(Path(output_folder) / name, Path(model_folder), *overrides)
    # The other processes serve until then.
    for one in others:
        one.close()


def connect(address: tuple[str, int], group: str) -> Connection:
    """A connection to the launcher, which learns that a worker of `group` is at this end."""
    while True:
        try:
            connection = Client(address)
        except ConnectionRefusedError:
            time.sleep(0.1)
            continue
        connection.send(group)
        return connection


if __name__ == "__main__":
    main(*sys.argv[1:])
