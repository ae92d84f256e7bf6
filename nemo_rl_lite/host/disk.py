"""Whether a folder can be written."""

import os
import tempfile
from pathlib import Path

# Bytes that a run writes at once when it starts.
_ROOM = 2**16
# Of a file, in bytes, in all usual file systems.
_LONGEST_NAME = 255


def why_not_writable(folder: Path) -> str:
    """Why a folder cannot be made or written: a file is in its place, a permission is missing, the disk is full; empty
    where it can. Makes a folder in the nearest one that exists, and removes it."""
    place = folder.absolute()
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in place.parts):
        return f"has a name of more than {_LONGEST_NAME} bytes"
    nearest = next(one for one in (place, *place.parents) if one.exists())
    if not nearest.is_dir():
        return f"{nearest} is a file"
    try:
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".can-be-written-") as probe:
            (Path(probe) / "some").write_bytes(bytes(_ROOM))
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror or error}"
    return ""
