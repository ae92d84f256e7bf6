"""Scripts for sbatch: what they ask for, and that they run the command word by word. Stand-ins are Slurm's programs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nemo_rl_lite.slurm import __main__ as slurm

TWO_NODES = ["recipes=grpo-qwen3-8b-2n8g-noncolocated"]
# srun: the command on this machine, as task 0. squeue: the job is running. sbatch keeps what it is given.
TOOLS = {
    "srun": 'printf "%s\\n" "$@" >"$SEEN/srun"; while [[ $1 != bash ]]; do shift; done; SLURM_PROCID=0 exec "$@"',
    "squeue": "echo ${JOB_STATE:-RUNNING}",
    "scontrol": 'echo "$@" >"$SEEN/scontrol"',
    "sbatch": 'cat >"$SEEN/script"; [[ -z ${REFUSES:-} ]] || { echo "$REFUSES" >&2; exit 1; }; echo "17;cluster"',
    # Stands for Python: says what it was given, makes a checkpoint, and waits for the signal or ends.
    "run": 'printf "%s\\n" "$@" >"$SEEN/run"; trap "exit 75" USR1; '
    '[[ -z ${LATEST:-} ]] || echo "$LATEST" >"run folder/checkpoints/latest"; '
    "[[ -z ${SIGNAL:-} ]] || { kill -USR1 $PPID; for _ in {1..3000}; do sleep 0.1; done; }; exit ${STATUS:-0}",
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder to work in, Slurm's programs, and what they were given."""
    for name in ("work", "tools", "seen"):
        (tmp_path / name).mkdir()
    for name, body in TOOLS.items():
        tool = tmp_path / "tools" / name
        tool.write_text(f"#!/usr/bin/env bash\n{body}\n")
        tool.chmod(0o755)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path


def script(capsys, *words: str) -> str:
    slurm.main(list(words))
    return capsys.readouterr().out


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_nodes_and_gpus_are_the_configurations(capsys, site):
    asked = directives(script(capsys, "-p", "gpu", "-t", "4:00:00", "--sbatch=--constraint=h100", *TWO_NODES))
    for option in ("--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=1", "--partition=gpu", "--time=4:00:00"):
        assert option in asked
    assert asked[-1] == "--constraint=h100" and "--signal=B:USR1@120" in asked and "--requeue" in asked
    assert {"--exclusive", "--mem=0"} <= set(asked)


def test_a_job_that_shares_its_node_says_how_much_of_it(capsys, site):
    asked = directives(script(capsys, "-c", "4", "--mem", "16G", "--gres", "gpu:h100:1", "recipes=grpo-tiny-1n1g"))
    assert {"--cpus-per-task=4", "--mem=16G", "--gres=gpu:h100:1"} <= set(asked)
    assert not {"--exclusive", "--gpus-per-node=1"} & set(asked)
    assert not any(option.startswith("--gpus") for option in directives(script(capsys)))


def test_options_may_be_kept_in_a_file(capsys, site):
    Path("site.txt").write_text("--partition=gpu\n--account=me\n")
    assert {"--partition=gpu", "--account=me"} <= set(directives(script(capsys, "@site.txt")))


CONTAINERS = {
    "pyxis": "srun_options=('--container-image=r#i:1' --container-mounts={work}:{work},/data:/data "
    "--container-workdir={work})",
    "apptainer": "in_container=(apptainer exec --nv --bind {work} --bind /data:/data --pwd {work} 'r#i:1')",
}


@pytest.mark.parametrize("runtime", CONTAINERS)
def test_containers_see_the_working_folder(capsys, site, runtime):
    container = ["--container-image=r#i:1", "--container-mounts=/data:/data", f"--container-runtime={runtime}"]
    text = script(capsys, *container, *TWO_NODES)
    assert CONTAINERS[runtime].format(work=site / "work") in text and "\npython=python\n" in text


@pytest.mark.parametrize("words", [TWO_NODES, ["--setup=module load cuda", "--interface=ib0", *TWO_NODES], []])
def test_the_script_is_good_shell(capsys, site, words):
    text = script(capsys, *words)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", "-S", "warning", "-"], input=text, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout


ODD = ["data=file", "data.train_path='a b.jsonl'", "data.validation_fraction=0.5"]
ODD += ["data.prompt_template='it\\'s {a} $HOME \"x\" `id`'"]


def run_job(capsys, site, *words: str, **environment: str) -> tuple[int, Path]:
    """Render a job and run it as Slurm would; its status, and what the programs saw."""
    (site / "work" / "a b.jsonl").write_text('{"a": 1, "answer": 2}\n' * 40)
    words = ("hydra.run.dir='run folder'", *words)
    text = script(capsys, f"--python={site / 'tools' / 'run'}", *words)
    Path("run folder/checkpoints").mkdir(parents=True, exist_ok=True)
    environment = {"SLURM_JOB_ID": "17", **environment}
    done = subprocess.run(["bash"], input=text, text=True, env=os.environ | environment, check=False, timeout=400)
    return done.returncode, site / "seen"


def test_every_word_of_the_command_arrives_as_it_was_given(capsys, site):
    status, seen = run_job(capsys, site, *ODD)
    assert status == 0
    assert (seen / "run").read_text().splitlines() == ["-m", "nemo_rl_lite.train", "hydra.run.dir='run folder'", *ODD]
    assert not (seen / "scontrol").exists() and not any(Path("run folder/.slurm").iterdir())


def test_the_signal_gets_to_the_launcher_and_a_stopped_run_is_queued_again(capsys, site):
    status, seen = run_job(capsys, site, SIGNAL="1", LATEST="step-00000003")
    assert status == 75 and (seen / "scontrol").read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    "environment",
    [
        {"STATUS": "3", "LATEST": "step-00000003"},
        {"STATUS": "75"},
        {"STATUS": "75", "LATEST": "step-00000003", "JOB_STATE": "CANCELLED"},
    ],
    ids=["failed", "no new checkpoint", "cancelled"],
)
def test_a_job_that_would_get_no_further_is_not_queued_again(capsys, site, environment):
    status, seen = run_job(capsys, site, **environment)
    assert status == int(environment["STATUS"]) and not (seen / "scontrol").exists()


def test_a_run_that_somebody_stopped_is_not_queued_again(capsys, site):
    Path("run folder").mkdir()
    Path("run folder/stop").write_text("step by somebody\n")
    status, seen = run_job(capsys, site, STATUS="75", LATEST="step-00000003")
    assert status == 75 and not (seen / "scontrol").exists()


def test_on_several_nodes_each_joins_ray_first(capsys, site):
    text = script(capsys, f"--python={site / 'tools' / 'run'}", "--interface=ib0", "--join-timeout=9", *TWO_NODES)
    subprocess.run(["bash"], input=text, text=True, env=os.environ | {"SLURM_JOB_ID": "17"}, check=True, timeout=400)
    ran = (site / "seen" / "run").read_text().split()
    assert ran[:3] == ["-m", "nemo_rl_lite.slurm.node", "--meeting"]
    assert {"--join-timeout-s=9", "--interface=ib0"} < set(ran)
    assert ran[ran.index("--") + 2 : ran.index("--") + 5] == ["-m", "nemo_rl_lite.train", *TWO_NODES]
    assert {"--nodes=2", "--ntasks-per-node=1"} < set((site / "seen" / "srun").read_text().split())


def test_it_is_submitted_and_the_job_named(capsys, site):
    assert script(capsys, "--submit", "--log=logs/%j.out") == "17\n"
    assert (site / "seen" / "script").read_text().startswith("#!/usr/bin/env bash\n") and Path("logs").is_dir()


def test_what_sbatch_says_against_a_job_is_shown(capsys, site, monkeypatch):
    monkeypatch.setenv("REFUSES", "invalid partition specified: nowhere")
    with pytest.raises(SystemExit) as caught:
        slurm.main(["--submit"])
    assert caught.value.code == 1
    assert capsys.readouterr().err.endswith("\nsbatch rejected the job: invalid partition specified: nowhere\n")


WRONG = {
    ("policy.lr=1e-4",): ["policy.lr", "policy.megatron_cfg.optimizer.lr"],
    ("--gres=gpu:h100:4", *TWO_NODES): ["--gres", "cluster.gpus_per_node = 8 need 8"],
    ("--sbatch=--gpus-per-node=4", *TWO_NODES): ["--gpus-per-node", "need 8"],
    ("--sbatch=-G 8", *TWO_NODES): ["-G 8", "need 16"],
    ("--log=logs/%j/out.txt",): ["--log = 'logs/%j/out.txt'", "exists before the job"],
    ("hydra.run.dir=s3://bucket/run",): ["hydra.run.dir", "is an address"],
    ("hydra.run.dir=outputs/${now:%H}",): ["hydra.run.dir", "must stay the same when the job is requeued"],
    ("-m", "algorithm.seed=1,2"): ["unrecognized arguments: -m"],
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_mistakes_are_told_before_anything_is_submitted(capsys, site, words):
    with pytest.raises(SystemExit) as caught:
        slurm.main(["--submit", *words])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and all(part in said for part in WRONG[words])
    assert not (site / "seen" / "script").exists()


def test_a_folder_for_the_log_gets_a_file(capsys, site):
    assert "--output=logs/slurm-%j.out" in directives(script(capsys, "--log=logs/"))


def test_a_printed_script_does_not_make_its_logs_folder(capsys, site):
    for folder in ("missing", "."):
        slurm.main([f"--log={folder}/%j.out"])
        printed = capsys.readouterr()
        assert ("note: create the folder of --log" in printed.err) == (folder == "missing")
        assert printed.out.startswith("#!") and not Path("missing").exists()


def test_gpus_and_memory_that_other_options_ask_for_are_asked_for_once(capsys, site):
    for gpus in ("-G 16", "--gpus=16", "--gres gpu:8", "--gpus-per-task=h100:8"):
        asked = directives(script(capsys, f"--sbatch={gpus}", "--sbatch=--mem-per-gpu=64G", *TWO_NODES))
        assert {gpus, "--mem-per-gpu=64G", "--exclusive"} <= set(asked)
        assert not {"--gpus-per-node=8", "--mem=0"} & set(asked)
    assert "--gpus-per-node=8" in directives(script(capsys, "--gres=nvme:1", *TWO_NODES))


def test_a_home_folder_is_written_out(capsys, site, monkeypatch):
    monkeypatch.setenv("HOME", str(site))
    text = script(capsys, "--log=~/logs/%j.out", "hydra.run.dir='~/run'")
    assert f"--output={site}/logs/%j.out" in directives(text) and f"run_folder={site}/run\n" in text


def test_a_job_that_would_do_nothing_or_lose_something_is_noted(capsys, site):
    Path("run").mkdir()
    Path("run/summary.json").write_text("{}")
    slurm.main(["hydra.run.dir=run", "checkpoint.resume_from=nope", "checkpoint.save_period=0"])
    said = capsys.readouterr().err
    keys = ("hydra.run.dir = run", "checkpoint.resume_from = nope", "cluster.gpus_per_node = 0")
    assert all(f"note: {key}" in said for key in (*keys, "checkpoint.save_period = 0"))
    slurm.main(["hydra.run.dir=other", "checkpoint.resume_from=run", *TWO_NODES])
    assert "note: " not in capsys.readouterr().err


@pytest.mark.parametrize(("address", "is_told"), [("http://me:sk-123@host", True), ("http://host", False)])
def test_a_secret_is_told_and_not_repeated(capsys, site, address, is_told):
    key = "logger.mlflow.tracking_uri"
    slurm.main(["--output", "job.sh", "logger.mlflow_enabled=true", f"{key}={address}"])
    job = Path("job.sh")
    # The command needs it; no one else may read it.
    assert job.read_text().count("sk-123") == is_told and (job.stat().st_mode & 0o077 == 0) is is_told
    assert (f"{key}: the script has the value in clear" in capsys.readouterr().err) is is_told
