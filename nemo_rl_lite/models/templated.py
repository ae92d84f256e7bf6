"""A model whose chat template comes from a file of the user's."""

import shutil
import tempfile
from pathlib import Path

from nemo_rl_lite.models.shape import NoModelError

# Its folder in that of a run.
TEMPLATED = "model"
TEMPLATE_FILE = "chat_template.jinja"
# Where transformers keeps more templates of a model, by name.
_MORE_TEMPLATES = "additional_chat_templates"


def with_template(model: Path, template: Path, target: Path) -> Path:
    """Make the folder `target`, which links to the files of the folder `model` and has the chat template of the file
    `template`; returns it. One that was made so before is replaced.

    Raises:
        NoModelError: `target` is something else.
        OSError: a file cannot be read or written.
    """
    if target.is_symlink() or (target.exists() and not _is_made_here(target)):
        raise NoModelError(f"{target} has files of its own, and the model with another chat template would replace it")
    text = template.read_text()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as unfinished:
        folder = Path(unfinished) / target.name
        folder.mkdir()
        for entry in model.iterdir():
            if entry.name not in (TEMPLATE_FILE, _MORE_TEMPLATES):
                (folder / entry.name).symlink_to(entry.resolve())
        (folder / TEMPLATE_FILE).write_text(text)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    return target


def _is_made_here(folder: Path) -> bool:
    return folder.is_dir() and all(one.is_symlink() or one.name == TEMPLATE_FILE for one in folder.iterdir())
