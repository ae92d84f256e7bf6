"""The short way through vLLM's scheduler leaves nothing out."""

from pathlib import Path

import pytest

from nemo_rl_lite.compat.versions import installed
from nemo_rl_lite.compat.vllm import COMPARED
from tests.functional.ranks import run_script

pytestmark = pytest.mark.functional


def test_it_is_the_default_on_the_version_that_this_file_compares():
    assert installed("vllm") in COMPARED


def test_steps_and_answers_are_those_of_vllms_own_scheduler(model_folder, engine_environment, tmp_path):
    script = Path(__file__).with_name("vllm_schedulers.py")
    run_script(script, [model_folder], engine_environment, tmp_path / "log")
