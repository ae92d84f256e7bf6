"""Photograph the upper part of a report of runs with Chromium, as docs/images/report.png: report_picture.py RUN...

The runs of the picture: `nrl-lite train`, and with run_name=lr-1e-3 policy.megatron_cfg.optimizer.lr=1e-3
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import record
from whole_runs import tiny_run

from nemo_rl_lite.report.page import write_report

PICTURE = record.ROOT / "docs" / "images" / "report.png"
SIZE = "1300,648"


def main(arguments: list[str]) -> None:
    if not arguments:
        sys.exit(__doc__)
    photograph([Path(run) for run in arguments], PICTURE)


def photograph(runs: list[Path], picture: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(runs, Path(folder) / "report.html")
        if browser is None:
            sys.exit("Chromium is missing")
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        options += [f"--window-size={SIZE}", "--virtual-time-budget=2000", f"--screenshot={picture}"]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=120)


def trial() -> None:
    """Write the page, and photograph it where there is a browser."""
    picture = Path(os.environ["NRL_BENCH_OUT"]) / "report.png"
    try:
        photograph([tiny_run()], picture)
    except SystemExit as missing:
        print(missing)


if __name__ == "__main__":
    record.start(main, trial)
