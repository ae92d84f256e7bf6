"""A model whose chat template comes from a file of the user's."""

import shutil
import tempfile
from pathlib import Path

# Its folder in that of a run.
TEMPLATED = "model"
TEMPLATE_FILE = "chat_template.jinja"
# Where transformers keeps more templates of a model, by name.
_MORE_TEMPLATES = "additional_chat_templates"


def with_template(model: Path, template: Path, target: Path) -> Path:
    """Make the folder `target`, which links to the files of the folder `model` and has the chat template of the file
    `template`; returns it. One that exists is replaced. Raises OSError."""
    text = template.read_text()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as unfinished:
        folder = Path(unfinished) / target.name
        folder.mkdir()
        for entry in model.resolve().iterdir():
            if entry.name not in (TEMPLATE_FILE, _MORE_TEMPLATES):
                (folder / entry.name).symlink_to(entry)
        (folder / TEMPLATE_FILE).write_text(text)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    return target
