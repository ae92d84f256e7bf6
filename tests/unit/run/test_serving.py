"""Which model `nrl-lite chat` and `nrl-lite serve` take of a folder, and what they say where there is none."""

import dataclasses
import io
import json
import socket
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console

from nemo_rl_lite import chat, serve
from nemo_rl_lite.errors import CheckpointError, ConfigError, LauncherError, UsageError
from nemo_rl_lite.generation.interface import Sampling
from nemo_rl_lite.run import serving
from nemo_rl_lite.run.serving import find_served, model_parser
from nemo_rl_lite.serving.protocol import RefusedError
from nemo_rl_lite.validation.compose import compose_config


def run_folder(folder: Path, *overrides: str, **changes: object) -> Path:
    """A run's folder without a model."""
    config = dataclasses.asdict(compose_config(overrides)) | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "command.txt").touch()
    return folder


def model_folder(folder: Path, **changes: object) -> Path:
    described = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 600, "dtype": "bfloat16"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described | changes))
    return folder


def find(
    folder: Path, most: int | None = None, *overrides: str, usual_tokens: int | None = None, **flags: float
) -> serving.Served:
    limits = ["--max-new-tokens", most] if most is not None else []
    limits += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    given = model_parser("nrl-lite chat", None, "").parse_intermixed_args([str(folder), *overrides, *map(str, limits)])
    return find_served(given, lambda message: None, usual_tokens)


def exported(run: Path, **changes: object) -> Path:
    """A run's folder with an exported model."""
    model_folder(run / "hf", **changes)
    return run


@pytest.fixture
def model_of_the_hub(tmp_path, monkeypatch) -> Path:
    """The folder that every name of the hub is fetched to."""
    folder = model_folder(tmp_path / "5f3a")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    return folder


@pytest.mark.parametrize(("method", "served"), [("ngram", "ngram"), ("mtp", None)])
def test_an_export_has_no_layers_for_multi_token_prediction(tmp_path, method, served):
    (run := tmp_path / "mine").mkdir()
    exported(run_folder(run, "policy.model_name=a/model", f"generation.speculation={method}"))
    assert find(run).config.generation.speculation == served


def test_a_runs_exported_model_has_its_engine_and_its_sampling(tmp_path):
    (run := tmp_path / "mine").mkdir()
    exported(run_folder(run, "generation=transformers", "generation.max_new_tokens=12", "generation.temperature=0.5"))
    (run / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4, "loss": 1}\n')
    served = find(run)
    generation = served.config.generation
    assert (served.name, served.folder, served.step) == ("mine", run / "hf", 4)
    assert served.other_names == ("grpo-reverse_digits", str(run))
    assert (generation.backend, generation.temperature) == ("transformers", 0.5)
    assert generation.colocated.enabled is False and "on CPUs" in str(served)
    flags = find(run, 20, temperature=0).flags.applied(Sampling.of(generation, ()))
    assert (flags.max_new_tokens, flags.temperature, flags.top_p) == (20, 0, generation.top_p)
    # The model's folder has the run's name, and not its own, which is "hf".
    assert find(run / "hf").name == "mine"


def test_a_model_is_named_by_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("older", "newer"):
        (run := Path("outputs") / name).mkdir(parents=True)
        exported(run_folder(run, "generation=transformers", run_name=f"my-{name}"))
        (run / "command.txt").write_text("nrl-lite train\n")
        status = {"state": "done", "started": f"2026-01-0{1 + (name == 'newer')}T00:00:00+00:00"}
        (run / "status.json").write_text(json.dumps(status))
    found = {word: find(Path(word)).name for word in ("last", "my-older", "newer", "outputs")}
    assert found == {"last": "newer", "my-older": "older", "newer": "newer", "outputs": "newer"}
    # A model's folder comes before a run of its name.
    assert find(model_folder(Path("my-older"))).of_run is False


def test_a_models_own_context_limits_a_chat(tmp_path):
    (run := tmp_path / "run").mkdir()
    exported(run_folder(run, "policy.max_total_sequence_length=96", "generation.max_new_tokens=48"))
    for folder in (run, model_folder(tmp_path / "mine")):
        config = find(folder).config
        assert (config.policy.max_total_sequence_length, config.generation.max_new_tokens) == (600, 599)
    long = find(model_folder(tmp_path / "long", max_position_embeddings=10**6, dtype="float32")).config
    assert (long.policy.max_total_sequence_length, long.policy.precision) == (8192, "float32")
    usual = find(run, usual_tokens=64)
    assert usual.config.generation.max_new_tokens == 64


def test_on_a_gpu_vllm_takes_what_fits_of_the_context(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "gpu_bytes", lambda: 80 << 30)
    config = find(model_folder(tmp_path / "long", max_position_embeddings=10**6)).config
    assert config.policy.max_total_sequence_length == 10**6 and config.generation.vllm_kwargs["max_model_len"] == -1


def test_a_folder_is_served_on_cpus_without_vllms_build_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "has_build", lambda engine, on_gpu: on_gpu)
    assert find(model_folder(tmp_path / "mine")).config.generation.backend == "transformers"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"most": 600}, "--max-new-tokens 600: must be above 0 and below the context of 600 tokens"),
        ({"temperature": -1}, "--temperature -1: must be 0, or"),
        ({"top_p": 2}, "--top-p 2: must be"),
        ({"top_k": -2}, "--top-k -2: must be"),
    ],
)
def test_a_flag_out_of_range_is_named(tmp_path, flags, said):
    with pytest.raises(UsageError, match=said):
        find(model_folder(tmp_path / "mine"), **flags)


TEMPLATE, THINKS = "policy.tokenizer.chat_template", "policy.tokenizer.chat_template_kwargs.enable_thinking"


def test_a_command_says_how_the_chats_of_any_model_are_written(tmp_path):
    (template := tmp_path / "own.jinja").write_text("{{ messages }}")
    (run := tmp_path / "run").mkdir()
    exported(run_folder(run, f"{TEMPLATE}={template}", f"{THINKS}=true", r"data.system_prompt='\${not.filled.in}'"))
    own = find(run).config
    # The exported model has the run's template.
    assert own.policy.tokenizer.chat_template is None
    assert own.policy.tokenizer.chat_template_kwargs == {"enable_thinking": True}
    for folder in (run, model_folder(tmp_path / "mine")):
        alone, said = find(folder).config, find(folder, None, f"{TEMPLATE}={template}", f"{THINKS}=false").config
        tokenizer = said.policy.tokenizer
        assert (tokenizer.chat_template, tokenizer.chat_template_kwargs) == (str(template), {"enable_thinking": False})
        policy = dataclasses.replace(said.policy, tokenizer=alone.policy.tokenizer)
        assert dataclasses.replace(said, policy=policy) == alone


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{TEMPLATE}=none.jinja", f"{TEMPLATE} = 'none.jinja'\n      cannot be read"),
        (f"{TEMPLATE}=3", "must be a string"),
        (f"{TEMPLATE}_kwargs=3", "must be a mapping"),
        (f"{TEMPLATE}s=own.jinja", f"did you mean {TEMPLATE}?"),
        ("enable_thinking", "is not an override"),
    ],
)
def test_what_a_command_cannot_say_of_chats_is_one_error(tmp_path, override, said):
    with pytest.raises(ConfigError, match=said) as raised:
        find(model_folder(tmp_path / "mine"), None, override)
    assert len(raised.value.violations) == 1


def test_keys_that_chats_do_not_read_are_noted(tmp_path, capsys):
    folder = model_folder(tmp_path / "mine")
    assert find(folder, None, "generation.top_k=3", "policy=megatron_gpu").config == find(folder).config
    assert "note: without effect here: generation.top_k, policy" in capsys.readouterr().err


def test_where_there_is_no_model_the_message_says_how_to_get_one(tmp_path, monkeypatch):
    run = run_folder(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"has neither hf/ nor a complete checkpoint: set checkpoint.export_hf_at_end"
    ):
        find(run)
    with pytest.raises(CheckpointError, match=r"nowhere: no such folder; name .* or a Hub model ID"):
        find(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is neither a run's folder nor a Hugging Face model's"):
        find(tmp_path / "empty")
    (run / "hf").mkdir()
    run_folder(tmp_path, unheard_of=1)
    with pytest.raises(CheckpointError, match="a run of another version of the launcher; export it"):
        find(run)
    monkeypatch.setattr(serving, "gpu_bytes", lambda: None)
    cluster = dataclasses.asdict(compose_config())["cluster"] | {"gpus_per_node": 1}
    run_folder(tmp_path, cluster=cluster)
    with pytest.raises(LauncherError, match="generated on GPUs, and this machine has none"):
        find(run)


def test_a_name_of_the_hub_is_fetched(model_of_the_hub, monkeypatch):
    served = find(Path("somebody/digits"))
    assert (served.name, served.folder) == ("digits", model_of_the_hub)
    error = LocalEntryNotFoundError("no network")
    monkeypatch.setattr("huggingface_hub.snapshot_download", MagicMock(side_effect=error))
    with pytest.raises(CheckpointError, match=r"^somebody/digits cannot be fetched from the hub: no network; check"):
        find(Path("somebody/digits"))


def test_a_misspelt_folder_is_no_name_of_the_hub(model_of_the_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    with pytest.raises(CheckpointError, match="no such folder"):
        find(Path("outputs/my-rum"))


@pytest.mark.parametrize("verb", [chat, serve])
def test_the_verbs_show_the_message_alone(tmp_path, capsys, verb):
    with pytest.raises(SystemExit) as ended:
        verb.main([str(tmp_path / "nowhere")])
    said = capsys.readouterr()
    assert ended.value.code == 1 and "no such folder" in said.err and not said.out


def test_a_conversation_goes_on_until_it_is_reset(monkeypatch, capsys):
    asked = []

    def reply(messages):
        asked.append([message["content"] for message in messages])
        if "too long" in asked[-1]:
            raise RefusedError(400, "no room")
        return str(len(asked))

    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\ntoo long\n/what is this\n/reset\nc\n/quit\nd\n"))
    console = Console(file=io.StringIO())
    assert chat.converse(reply, console) == 1
    assert asked == [["a"], ["a", "1", "b"], ["a", "1", "b", "2", "too long"], ["c"]]
    assert capsys.readouterr().out == "1\n2\n4\n"
    assert (
        "no room. /reset starts a new" in console.file.getvalue() and "unknown command /what" in console.file.getvalue()
    )


@pytest.mark.parametrize("at_terminal", [True, False])
def test_a_response_does_not_control_the_terminal(monkeypatch, capsys, at_terminal):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: at_terminal, raising=False)
    chat.converse(lambda messages: "\x1b]52;c;eA==\x07\u202eé\n\tx", Console(file=io.StringIO()))
    escaped = "\\x1b]52;c;eA==\\x07\\u202eé\n\tx\n"
    assert capsys.readouterr().out == (escaped if at_terminal else "\x1b]52;c;eA==\x07\u202eé\n\tx\n")


def test_a_port_in_use_is_found_before_the_model_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serve, "start_engine", lambda served: pytest.fail("the model loads"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            serve.main([str(model_folder(tmp_path / "mine")), f"--port={port}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"127.0.0.1:{port}" in said and "--port" in said and "generation" not in said


@pytest.mark.parametrize("port", ["0", "99999", "-1", "http"])
def test_a_port_that_is_none(port, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.main([str(tmp_path), f"--port={port}"])
    assert ended.value.code == 2 and f"'{port}' is not a port" in capsys.readouterr().err
