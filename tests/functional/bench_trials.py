"""Run trials of scripts/bench in one process: bench_trials.py FOLDER SCRIPT...

FOLDER/SCRIPT.error says why a trial failed; it is empty for one that did not.
"""

import importlib
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    sys.argv = ["--trial"]
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
    for name in names:
        error = ""
        try:
            importlib.import_module(name).trial()
        except (Exception, SystemExit):
            error = traceback.format_exc()
        (Path(folder) / f"{name}.error").write_text(error)
