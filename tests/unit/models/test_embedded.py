"""Place and determinism of the embedded model."""

from pathlib import Path

import pytest
import torch

from nemo_rl_lite.models import embedded
from nemo_rl_lite.models.embedded import embedded_folder
from nemo_rl_lite.validation.compose import compose_config


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The working folder; the user's cache is beside it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "work"


def test_all_working_folders_share_one_model(place, monkeypatch):
    config = compose_config([])
    folder = embedded_folder(config)
    assert folder.is_relative_to(place.parent / "cache" / "nemo_rl_lite")
    monkeypatch.chdir(place.parent)
    assert embedded_folder(config) == folder
    # Relative values are ignored, as the XDG specification says.
    monkeypatch.setenv("HOME", str(place.parent / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert embedded_folder(config).is_relative_to(place.parent / "home" / ".cache")


def test_a_model_below_the_working_folder_is_used(place):
    config = compose_config([])
    old = place / "outputs" / "models" / embedded_folder(config).name
    old.mkdir(parents=True)
    assert embedded_folder(config) == old


def test_a_cache_that_cannot_be_written_or_that_other_nodes_may_not_see(place, monkeypatch):
    several = compose_config(["cluster.num_nodes=2", "cluster.cpu_ranks=2"])
    assert embedded_folder(several).parent == place / "outputs" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    assert embedded_folder(compose_config([])).parent == place / "outputs" / "models"


def test_the_model_does_not_depend_on_the_number_of_threads(tmp_path):
    """All runs of a user share it, also those in processes with one thread."""
    made, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            folder = embedded.prepare(tmp_path / str(count), num_digits=4, seed=1, steps=2)
            made.append((folder / "model.safetensors").read_bytes())
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert made[0] == made[1]
