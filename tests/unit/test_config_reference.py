"""scripts/config_reference.py documents every key and file of configs/."""

import sys

import pytest

from tests.unit.pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import config_reference
from config_reference import PAGE


def test_the_page_is_up_to_date(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["config_reference.py", "--check"])
    config_reference.main()
    stale = tmp_path / "configuration.md"
    stale.write_text(PAGE.read_text().replace("what it does", "what it did"))
    monkeypatch.setattr(config_reference, "PAGE", stale)
    with pytest.raises(SystemExit, match="is not what configs/ and the schema say"):
        config_reference.main()
