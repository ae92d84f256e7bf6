"""Faster imports of large packages."""

import gc
import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from nemo_rl_lite.compat.versions import written_for

written_for(__name__, "transformers", "5.12")


class _Distributions(Mapping[str, list[str]]):
    """A lazy `importlib.metadata.packages_distributions()`, whose table takes a second.

    The table is built for a package whose distribution has a different name, and by `get`.
    """

    def __getitem__(self, package: str) -> list[str]:
        try:
            return [importlib.metadata.distribution(package).name]
        except importlib.metadata.PackageNotFoundError:
            return self._all[package]

    def get(self, package: str, default: Any = None) -> Any:
        return self._all.get(package, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return _packages_distributions()


_packages_distributions = importlib.metadata.packages_distributions


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import transformers, megatron and vLLM faster in the block.

    Garbage collection is off, as imported modules stay alive. transformers gets a lazy table of distributions.
    """
    collects = gc.isenabled()
    gc.disable()
    importlib.metadata.packages_distributions = _Distributions  # pyrefly: ignore
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = _packages_distributions
        if collects:
            gc.enable()
