"""Services outside this machine: the Hugging Face hub and W&B. Runs need neither. No secret is shown or sent."""

import netrc
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from nemo_rl_lite.diagnosis.check import Check, Examination, Machine, Status
from nemo_rl_lite.diagnosis.host import hub_cache
from nemo_rl_lite.host.wandb_login import WANDB, netrc_file, wandb_login

HUB = "https://huggingface.co"
ANSWER_LIMIT_S = 4.0
# As huggingface_hub understands its switches.
_YES = ("1", "ON", "YES", "TRUE")
_HUB_OFF = "models and datasets by their hub names; local folders, files and what is in the cache work"
_WANDB_OFF = "logger.wandb_enabled; logger.wandb.mode=offline works, and so do metrics.jsonl and TensorBoard"


def hub(machine: Machine) -> Iterator[Check]:
    """Whether the hub answers, and whether this user has a token for it."""
    environment = machine.environment
    address = environment.get("HF_ENDPOINT") or HUB
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environment.get(name, "").upper() in _YES]
    if offline:
        yield Check("hub", Status.WARN, f"{offline[0]} is set", fix=f"unset {offline[0]}", off=_HUB_OFF)
    else:
        trouble = _unreachable(address)
        if trouble:
            fix = "a network or proxy (HTTPS_PROXY), a mirror (HF_ENDPOINT), or policy.model_name=./FOLDER"
            yield Check("hub", Status.WARN, f"{address} cannot be reached: {trouble}", fix=fix, off=_HUB_OFF)
        else:
            yield Check("hub", Status.OK, f"{address} answers")
    if has_hub_token(environment):
        yield Check("hub token", Status.OK, "there is one")
    else:
        yield Check("hub token", Status.SKIPPED, "none; public models need none", off="gated and private models")


def wandb(machine: Machine) -> Iterator[Check]:
    """Whether W&B would find a key."""
    environment = machine.environment
    address = environment.get("WANDB_BASE_URL") or WANDB
    if environment.get("WANDB_MODE", "online") != "online":
        # The launcher names the mode itself, and W&B takes what it is told before what is in the environment.
        found = f"WANDB_MODE={environment['WANDB_MODE']}, which logger.wandb.mode overrides"
        fix = f"logger.wandb.mode={environment['WANDB_MODE']}"
        yield Check("W&B mode", Status.WARN, found, fix=fix, off="the mode that you meant")
    try:
        source = wandb_login(environment, address)
    except (OSError, netrc.NetrcParseError) as error:
        where = netrc_file(environment)
        yield Check("W&B", Status.WARN, f"{where} cannot be read: {_shown(error)}", fix="wandb login", off=_WANDB_OFF)
        return
    if source:
        yield Check("W&B", Status.OK, f"a key for {urlsplit(address).netloc} is in {source}")
    else:
        yield Check("W&B", Status.WARN, "not logged in", fix="wandb login, or WANDB_API_KEY", off=_WANDB_OFF)


def has_hub_token(environment: Mapping[str, str]) -> bool:
    if environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    named = environment.get("HF_TOKEN_PATH")
    file = Path(named).expanduser() if named else hub_home(environment) / "token"
    return file.is_file() and file.stat().st_size > 0


def hub_home(environment: Mapping[str, str]) -> Path:
    home = environment.get("HF_HOME")
    # The cache may be elsewhere; without HF_HOME the default home is beside it.
    return Path(home).expanduser() if home else hub_cache({**environment, "HF_HUB_CACHE": ""}).parent


def _unreachable(address: str) -> str:
    """Why there is no answer; empty where there is one, whatever it says."""
    try:
        request = urllib.request.Request(address, method="HEAD", headers={"User-Agent": "nemo_rl_lite doctor"})
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S):
            return ""
    except urllib.error.HTTPError:
        return ""
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, ValueError) as error:
        return str(error)


def _shown(error: Exception) -> str:
    """Without the text of the file, which has keys in it."""
    if isinstance(error, netrc.NetrcParseError):
        return f"it is malformed at line {error.lineno}"
    return str(error)


EXAMINATIONS = (
    Examination("services", "hub", hub),
    Examination("services", "W&B", wandb),
)
