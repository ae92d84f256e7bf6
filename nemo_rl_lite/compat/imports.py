"""Imports of large packages, in a fraction of the time that they take by themselves."""

import gc
import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from nemo_rl_lite.compat.versions import written_for

written_for("transformers", "5.12", __name__)


class _Distributions(Mapping[str, list[str]]):
    """The distributions of each package, as `importlib.metadata.packages_distributions` returns them.

    The table of all of them takes a second: it is made for a package whose distribution has another name.
    """

    def __getitem__(self, package: str) -> list[str]:
        try:
            return [importlib.metadata.distribution(package).name]
        except importlib.metadata.PackageNotFoundError:
            return self._all[package]

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
    """Import transformers, megatron and vLLM within the block.

    What a module defines stays, so the garbage collector finds nothing, again and again. transformers asks for the
    distributions of all packages.
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
