"""scripts/config_reference.py documents every key and file of configs/."""

import sys

from scripts import config_reference


def test_the_page_is_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["config_reference.py", "--check"])
    config_reference.main()
