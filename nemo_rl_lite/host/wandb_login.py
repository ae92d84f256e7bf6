"""Finds where this machine keeps its key for W&B. Imports nothing heavy, and never shows the key."""

import netrc
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

WANDB = "https://api.wandb.ai"


def wandb_login(environment: Mapping[str, str], address: str) -> str:
    """The variable or file where W&B would find its key for the server at `address`; empty without one.

    Raises:
        OSError, netrc.NetrcParseError: the netrc file cannot be read.
    """
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if environment.get(name):
            return name
    file = netrc_file(environment)
    if not file.is_file():
        return ""
    entry = netrc.netrc(str(file)).authenticators(urlsplit(address).netloc)
    return str(file) if entry and entry[2] else ""


def netrc_file(environment: Mapping[str, str]) -> Path:
    if named := environment.get("NETRC"):
        return Path(named).expanduser()
    home = Path(environment.get("HOME", "~")).expanduser()
    return next((file for file in (home / ".netrc", home / "_netrc") if file.is_file()), home / ".netrc")
