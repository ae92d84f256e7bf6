"""The files of megatron-core's distributed checkpoints: a thread writes this rank's, and what reads them runs no code
in them."""

import pickle
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from nemo_rl_lite.checkpoint.store import digests_of
from nemo_rl_lite.checkpoint.trust import reading_only
from nemo_rl_lite.compat.megatron import async_request, staged_writing
from nemo_rl_lite.errors import CheckpointError

# What reading a damaged file may raise.
_OF_DAMAGED_FILES = (
    OSError,
    RuntimeError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)


class Writing:
    """A save in progress: a copy of the state, and the thread that writes it."""

    def __init__(self, state: Callable[[], dict[str, Any]], folder: Path, live: Callable[[], set[int]]):
        """Copy what `state` returns to host memory, and begin to write it to an empty folder. `live`: addresses of
        storages that will change meanwhile.

        Raises:
            CheckpointError: megatron-core cannot save this, or not to this folder.
        """
        request = _request(state, folder)
        self._finalize, self._folder = request.finalize_fns, folder
        self._digests: dict[str, str] = {}
        changing = live()
        writing = staged_writing(request, lambda bucket: _staged(bucket, changing))

        def work() -> None:
            # Other ranks may have this rank's state.
            if writing is not None:
                rank, write = writing
                write()
                # Here rather than in the launcher: ranks do it at once, while training continues.
                self._digests = digests_of(folder, folder.glob(f"__{rank}_*"))

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the thread has written, or failed to."""
        return not self._thread.is_alive()

    def finish(self) -> dict[str, str]:
        """Wait until all ranks have written and make the folder loadable; returns the digests of this rank's files.

        Raises:
            CheckpointError: a rank could not write.
        """
        self._thread.join()
        try:
            for finalize in self._finalize:
                finalize()
        except (CheckpointException, OSError) as error:
            raise CheckpointError(f"{_cause(error)}{_free(self._folder)}") from error
        return self._digests


def read(sharded: dict[str, Any], folder: Path) -> Any:
    """Read this rank's part of a state, which `sharded` describes. Raises CheckpointError."""
    from megatron.core import dist_checkpointing

    return _reading(folder, lambda: dist_checkpointing.load(sharded, str(folder)))


def read_common(folder: Path) -> dict[str, Any]:
    """Read what is not sharded. Raises CheckpointError."""
    from megatron.core import dist_checkpointing

    return _reading(folder, lambda: dist_checkpointing.load_common_state_dict(str(folder)))


def _request(state: Callable[[], dict[str, Any]], folder: Path) -> Any:
    """megatron-core's AsyncRequest to write what `state` returns."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        return async_request(state(), folder)
    # megatron-core refuses a model or optimizer by an assertion, on all ranks alike.
    except (AssertionError, NotImplementedError, OSError, CheckpointException, CheckpointingException) as error:
        raise CheckpointError(_cause(error)) from error


def _reading(folder: Path, reader: Callable[[], Any]) -> Any:
    """Call `reader` so that no code in `folder` can run. Raises CheckpointError."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    try:
        with reading_only(folder):
            return reader()
    except (CheckpointingException, CheckpointException, pickle.PickleError, *_OF_DAMAGED_FILES) as error:
        raise CheckpointError(f"the policy cannot be read from {folder}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """The error in one line; torch's message has every rank's traceback."""
    lines = str(error).splitlines()
    named = [line.strip() for line in lines if re.match(r"\s*\w+Error: ", line)]
    if isinstance(error, CheckpointException) and not error.failures:
        return "another rank could not write its part"
    return "; ".join(named) or next(iter(lines), "") or type(error).__name__


def _free(folder: Path) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(folder).free / 2**30:.1f} GiB are free there)"
    return ""


def _staged(bucket: Any, live: set[int]) -> Any:
    """Copy a bucket (file, key, (bytes, tensors)) of megatron-core to host memory. megatron-core itself does not copy
    tensors that are in host memory already, although training keeps writing to them."""
    file, key, (data, tensors) = bucket
    own = [(item, t.clone() if t.untyped_storage().data_ptr() in live else t) for item, t in tensors]
    return file, key, (data, own)
