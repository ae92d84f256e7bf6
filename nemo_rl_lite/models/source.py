"""Locate the weights that a run starts from: on disk, on the hub, or made here."""

from pathlib import Path

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.errors import ConfigError, Violation
from nemo_rl_lite.models.embedded_task import NAME, embedded_digits, embedded_folder
from nemo_rl_lite.models.shape import NoModelError, is_hub_name
from nemo_rl_lite.observability.console import RunConsole


def locate_model(config: Config, console: RunConsole, untrained: Path | None = None) -> Path:
    """Return the folder of `policy.model_name`, made or downloaded if it is missing. With `untrained`, a missing
    embedded model is made below that folder, without its warm-up.

    Raises:
        ConfigError: the hub cannot be reached, or has no such model.
    """
    name = config.policy.model_name
    if name == NAME:
        return _embedded(config, console, untrained)
    if not is_hub_name(name):
        return Path(name).expanduser().resolve()
    try:
        with console.busy(f"fetching {name}"):
            return from_hub(name)
    except NoModelError as error:
        raise ConfigError([Violation("policy.model_name", name, str(error), error.fix)]) from None


def from_hub(name: str) -> Path:
    """Return the folder of a hub model, downloaded if it is missing. Raises NoModelError: the hub does not give it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        fix = "check the name and the network, or give a local folder such as ./models/NAME"
        raise NoModelError(f"cannot be fetched from the hub: {cause}", fix) from None


def _embedded(config: Config, console: RunConsole, untrained: Path | None) -> Path:
    from nemo_rl_lite.models.embedded import prepare

    digits, folder = embedded_digits(config), embedded_folder(config)
    if not folder.is_dir() and untrained is not None:
        return prepare(untrained / folder.name, digits, config.algorithm.seed, steps=0)
    if not folder.is_dir():
        console.say(f"warming up a tiny model on {digits}-digit strings by SFT; it is kept in {folder}")

        def show(step: int, loss: float) -> None:
            if step % 10 == 0:
                console.say(f"  sft step {step:>3}  loss {loss:.3f}")

        prepare(folder, digits, config.algorithm.seed, show)
    return folder
