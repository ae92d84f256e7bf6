import time

import pytest

from nemo_rl_lite.diagnosis.smi import NoAnswerError, parse_gpus, parse_links, parse_processes, read_gpus, sysfs_address
from tests.unit.diagnosis import samples


def test_one_h100(tmp_path):
    answer = read_gpus(samples.answering(tmp_path, samples.H100))
    (gpu,) = answer.gpus
    assert (gpu.index, gpu.name, gpu.driver) == (0, "NVIDIA H100 80GB HBM3", "580.159.04")
    assert (gpu.total_mib, gpu.used_mib, gpu.capability) == (81559, 4, (9, 0))
    assert (gpu.bus_id, gpu.compute_mode) == ("0000:3b:00.0", "Default")
    assert answer.links == {} and answer.processes == () and answer.trouble == ""


def test_four_h200_with_nvlink(tmp_path):
    answer = read_gpus(samples.answering(tmp_path, samples.H200_X4, samples.H200_PROCESSES, samples.H200_TOPOLOGY))
    assert [gpu.index for gpu in answer.gpus] == [0, 1, 2, 3]
    assert [gpu.bus_id for gpu in answer.gpus] == ["0000:19:00.0", "0000:3b:00.0", "0000:9b:00.0", "0000:bb:00.0"]
    assert answer.links == dict.fromkeys([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], "NV18")
    assert [(one.pid, one.name, one.memory) for one in answer.processes] == [
        ("4242", "/usr/bin/python3", "69800"),
        ("4243", "python -c a, b", "[N/A]"),
    ]


def test_links_over_pcie():
    assert parse_links(samples.PCIE_TOPOLOGY) == {(0, 1): "PHB"}
    assert parse_links("") == {} and parse_links("nonsense\n") == {}


def test_no_command_is_no_trouble(tmp_path):
    answer = read_gpus(str(tmp_path / "absent"))
    assert answer.gpus == () and answer.trouble == ""


@pytest.mark.parametrize(
    ("said", "status", "trouble"),
    [
        (samples.NO_DRIVER, 9, "couldn't communicate with the NVIDIA driver"),
        (samples.MISMATCH, 18, "Driver/library version mismatch"),
        ("No devices were found\n", 6, "No devices were found"),
        ("No devices were found\n", 0, "No devices were found"),
        ("", 1, "ended with 1"),
        ("something else entirely\n", 0, "not understood: something else entirely"),
    ],
)
def test_a_driver_in_trouble(tmp_path, said, status, trouble):
    (tmp_path / "said").write_text(said)
    answer = read_gpus(samples.smi(tmp_path, f"cat {tmp_path}/said; exit {status}"))
    assert answer.gpus == () and trouble in answer.trouble


def test_an_old_driver_does_not_know_capabilities(tmp_path):
    (tmp_path / "old").write_text(samples.OLD_FIELD)
    (tmp_path / "gpu").write_text(samples.OLD_DRIVER)
    script = f'case "$1" in *compute_cap*) cat {tmp_path}/old; exit 2 ;; --query-gpu*) cat {tmp_path}/gpu ;; esac'
    (gpu,) = read_gpus(samples.smi(tmp_path, script)).gpus
    assert gpu.driver == "470.182.03" and gpu.capability is None


def test_a_hanging_command_is_left(tmp_path):
    started = time.monotonic()
    answer = read_gpus(samples.smi(tmp_path, "exec sleep 60"), limit_s=0.3)
    assert "no answer within 0.3 s" in answer.trouble and time.monotonic() - started < 55


def test_a_refused_topology_leaves_the_rest(tmp_path):
    command = samples.answering(tmp_path, samples.H200_X4)
    (tmp_path / "topology").unlink()
    answer = read_gpus(command)
    assert len(answer.gpus) == 4 and answer.links == {}


def test_a_gpu_without_memory_of_its_own():
    (gpu,) = parse_gpus("0, GPU-1, NVIDIA Thor, 00000000:01:00.0, 580.00, [N/A], [N/A], Default, 11.0\n")
    assert (gpu.total_mib, gpu.used_mib, gpu.capability) == (0, 0, (11, 0))


def test_what_is_no_row_of_gpus():
    with pytest.raises(NoAnswerError, match="not understood"):
        parse_gpus("a, b\n")
    assert parse_processes("No running processes found\n") == ()


def test_addresses():
    assert sysfs_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert sysfs_address("0001:0A:1F.7") == "0001:0a:1f.7"
