import io

import pytest
from rich.console import Console

from nemo_rl_lite.models.shape import NoModelError
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.run import model
from nemo_rl_lite.validation.compose import compose_config

ON_A_GPU = ["cluster.gpus_per_node=1", "policy=megatron_gpu", "generation=vllm_gpu", "policy.model_name=a/b"]


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """What is printed, and the metrics, for overrides and the size of a GPU."""
    from nemo_rl_lite.models.embedded import MODEL_CONFIG
    from nemo_rl_lite.models.shape import model_shape

    monkeypatch.setattr(model, "read_model_shape", lambda name: model_shape(MODEL_CONFIG))

    def show(overrides, gpu, host=2**40):
        monkeypatch.setattr(model, "gpu_bytes", lambda: gpu)
        monkeypatch.setattr(model, "free_host_bytes", lambda: host)
        output = io.StringIO()
        console = RunConsole(Console(file=output, width=100))
        metrics = model.show_memory_plan(compose_config(overrides), tmp_path, console)
        return output.getvalue(), metrics

    return show


def test_the_table_and_its_metrics_come_first(shown):
    text, metrics = shown([*ON_A_GPU, "offload=pinned"], 80 * 2**30)
    assert "a GPU of 80.0 GiB" in text and "optimizer states" in text and "host" in text
    assert metrics["memory/predicted/generate/optimizer_states"] == 0
    assert metrics["memory/predicted/train/optimizer_states"] > 0
    assert metrics["memory/predicted/generate/kv_cache"] > 0


def test_a_phase_that_will_hardly_fit_is_said(shown):
    text, _ = shown(ON_A_GPU, 8 * 2**30)
    assert "phase generate may not fit: 11.0 GiB on a GPU of 8.0 GiB" in " ".join(text.split())
    assert "offload=pinned" in text
    assert "will" not in shown([], None)[0]
    assert "hardly" not in shown(ON_A_GPU, 80 * 2**30)[0]


def test_without_the_size_of_a_gpu_the_table_says_what_it_lacks(shown):
    text, metrics = shown(ON_A_GPU, None)
    assert "parameters" in text and "the KV cache is not predicted" in " ".join(text.split())
    assert metrics["memory/predicted/train/parameters"] > 0


def test_a_model_of_an_unknown_kind_has_a_line_instead(shown, monkeypatch):
    def unknown(name):
        raise NoModelError("config.json is unusable: it is not that of a text model")

    monkeypatch.setattr(model, "read_model_shape", unknown)
    text, metrics = shown(ON_A_GPU, 80 * 2**30)
    assert "memory is not predicted for this model" in text and metrics == {}


def test_host_memory_is_counted_for_all_ranks_of_a_machine(shown):
    two = ["cluster.gpus_per_node=2", "offload=colocated"]
    assert "host memory" not in shown([*ON_A_GPU, *two], 80 * 2**30)[0]
    text = " ".join(shown([*ON_A_GPU, *two], 80 * 2**30, host=2**20)[0].split())
    assert "the 2 policy rank(s) of a machine need" in text and "has 1 MiB free" in text
