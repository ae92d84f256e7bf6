"""Write docs/configuration.md from the schema and configs/. With --check, fail if the page is out of date."""

import sys
from pathlib import Path

from nemo_rl_lite.config.reference import UndocumentedError, page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"


def main() -> None:
    """Write or check the page."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is out of date: run python scripts/config_reference.py")


if __name__ == "__main__":
    try:
        main()
    except UndocumentedError as error:
        sys.exit(f"config_reference: {error}")
