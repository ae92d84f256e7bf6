"""Write docs/configuration.md from the schema (types, ranges, choices) and configs/ (comments, defaults, files).

With --check it writes nothing and fails where the page is stale. A key or a file without a comment is an error.
"""

import sys
from pathlib import Path

from nemo_rl_lite.config.comments import UndocumentedError
from nemo_rl_lite.config.reference import Reference

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"


def main() -> None:
    """Write or check the page."""
    page = Reference.of_package().page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        sys.exit(f"{PAGE.name} is not what configs/ and the schema say: python scripts/config_reference.py")


if __name__ == "__main__":
    try:
        main()
    except UndocumentedError as error:
        sys.exit(f"config_reference: {error}")
