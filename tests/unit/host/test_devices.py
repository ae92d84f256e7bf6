from nemo_rl_lite.host.devices import gpu_bytes, gpu_name


def answering(folder, text: str, status: int = 0) -> str:
    """A command that prints `text`."""
    script = folder / "smi"
    script.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
    script.chmod(0o755)
    return str(script)


def test_the_smallest_gpu_counts(tmp_path):
    assert gpu_bytes(answering(tmp_path, "81559\\n40960\\n")) == 40960 * 2**20


def test_no_answer_is_no_size(tmp_path):
    assert gpu_bytes(str(tmp_path / "absent")) is None
    assert gpu_bytes(answering(tmp_path, "[N/A]\\n")) is None
    assert gpu_bytes(answering(tmp_path, "")) is None
    assert gpu_bytes(answering(tmp_path, "81559\\n", status=9)) is None


def test_gpus_have_a_name_where_all_are_of_one_kind(tmp_path):
    assert gpu_name(answering(tmp_path, "NVIDIA H200\\nNVIDIA H200\\n")) == "NVIDIA H200"
    assert gpu_name(answering(tmp_path, "NVIDIA H200\\nNVIDIA B200\\n")) is None
    assert gpu_name(answering(tmp_path, "")) is None and gpu_name(str(tmp_path / "absent")) is None
