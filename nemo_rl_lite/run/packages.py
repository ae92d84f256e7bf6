"""Imports the launcher's own heavy packages while Ray and the workers' processes start."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl_lite.config.algorithms import algorithm_of
from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.config.user_code import imported
from nemo_rl_lite.host.distributions import listed_quickly


class Packages:
    """Packages that a thread imports. Until `wait` returns, no other thread may import them: two threads that import
    transformers at once can leave it half-imported."""

    def __init__(self, config: Config):
        self._config = config
        self._error: BaseException | None = None
        # The interpreter waits at its end for a thread that is no daemon: one that it ends in native code aborts it.
        self._thread = threading.Thread(target=self._import, name="packages")

    @contextmanager
    def importing(self) -> Iterator["Packages"]:
        """Begin to import; the block ends when that is done."""
        self._thread.start()
        try:
            yield self
        finally:
            self._thread.join()

    def wait(self) -> None:
        """Wait until everything is imported. Raises what the import has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _import(self) -> None:
        try:
            with listed_quickly():
                imported(algorithm_of(self._config).job)
                from transformers import AutoTokenizer  # noqa: F401
        except BaseException as error:  # it belongs to the thread that waits
            self._error = error
