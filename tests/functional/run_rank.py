"""One rank of whole runs without Ray: run_rank.py MODEL_FOLDER OUTPUT_FOLDER RUNS, a JSON object of overrides by name.

The launcher is in rank 0's process, and so is the first policy rank. Each run has a folder of OUTPUT_FOLDER.
"""

import json
import os
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from tests.functional.here import GroupHere, serve, train_here


def main(model_folder: str, output_folder: str, runs: str) -> None:
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] != "0":
        serve(connect(address))
        return
    with Listener(address, backlog=8) as listener:
        GroupHere.peers = [listener.accept() for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    for name, overrides in json.loads(runs).items():
        train_here(Path(output_folder) / name, Path(model_folder), *overrides)


def connect(address: tuple[str, int]) -> Connection:
    while True:
        try:
            return Client(address)
        except ConnectionRefusedError:
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
