"""The command itself, as users run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SECRET = "0123456789abcdef0123456789abcdef01234567"


def doctor(folder: Path, *arguments: str, python=(), module="nemo_rl_lite.doctor", **environment: str):
    """Run it in `folder`, where nothing outside can be reached."""
    (folder / ".netrc").write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    own = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "TMPDIR": "/tmp",
        "HF_TOKEN": SECRET,
        "WANDB_API_KEY": SECRET,
    }
    command = [sys.executable, *python, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=own | environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert SECRET not in done.stdout + done.stderr
    return done


def test_lines_for_people(tmp_path):
    done = doctor(tmp_path)
    assert done.stderr == "" and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert [line for line in lines[:-1] if not line.startswith("  ")] == [
        "environment",
        "packages",
        "gpus",
        "host",
        "network",
    ]
    assert any(line.split()[:3] == ["ok", "Python", "3.12." + str(sys.version_info.micro)] for line in lines)
    assert done.returncode == (1 if any(line.startswith("  fail ") for line in lines) else 0)
    assert " ok, " in lines[-1]
    assert [file.name for file in tmp_path.iterdir()] == [".netrc"], "it leaves nothing behind"


def test_a_list_for_machines(tmp_path):
    done = doctor(tmp_path, "--json", RAY_ADDRESS="127.0.0.1:9")
    checks = json.loads(done.stdout)
    assert done.stderr == "" and done.returncode == 1
    assert "RAY_ADDRESS" in [check["name"] for check in checks if check["status"] == "fail"]
    assert {tuple(check) for check in checks} == {("subject", "name", "status", "found", "wanted", "fix", "off")}
    assert {check["status"] for check in checks} <= {"ok", "warn", "fail", "skipped"}
    assert all(isinstance(value, str) for check in checks for value in check.values())
    assert not [check for check in checks if check["status"] == "ok" and (check["fix"] or check["off"])]
    # Everything that is off says how to mend it.
    assert all(check["fix"] for check in checks if check["status"] in ("warn", "fail")), checks


def test_it_runs_where_nothing_is_installed(tmp_path):
    done = doctor(tmp_path, "--json", python=("-S",))
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 1 and done.stderr == ""
    for name in ("torch", "ray", "megatron-core", "rich", "hydra-core"):
        assert (checks[name]["status"], checks[name]["found"]) == ("fail", "not installed")
    assert (checks["wandb"]["status"], checks["wandb"]["off"]) == ("warn", "logger.wandb_enabled")
    assert checks["memory"]["found"] == "not examined: No module named 'psutil'"
    plain = doctor(tmp_path, python=("-S",))
    assert plain.returncode == 1 and plain.stderr == "" and "not installed" in plain.stdout


def test_it_is_a_verb_of_the_console_script(tmp_path):
    done = doctor(tmp_path, "doctor", "--help", module="nemo_rl_lite.cli")
    assert done.returncode == 0 and done.stdout.startswith("usage: nrl-lite doctor")
    # The other verbs need more than the standard library.
    done = doctor(tmp_path, "doctor", "--json", module="nemo_rl_lite.cli", python=("-S",))
    assert done.returncode == 1 and json.loads(done.stdout)
    done = doctor(tmp_path, "docter", module="nemo_rl_lite.cli")
    assert done.returncode == 2 and "unknown command 'docter'; did you mean doctor?" in done.stderr


def test_nothing_heavy_is_imported(tmp_path):
    code = (
        "import sys\nfrom nemo_rl_lite.diagnosis.checks import diagnose\ndiagnose()\n"
        "print(sorted({'torch', 'ray', 'vllm', 'hydra', 'transformers', 'megatron.core', 'wandb'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
