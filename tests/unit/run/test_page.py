"""The page of runs, in a real browser where there is one."""

import json
import re
import struct

import pytest

from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.report import __main__ as report
from nemo_rl_lite.report.page import embedded, page, write_report
from nemo_rl_lite.report.record import ReportError, read_run
from nemo_rl_lite.run.run import write_last_report
from tests.unit.run.browser import CHROMIUM, browser
from tests.unit.run.run_folders import HOSTILE, make_asynchronous_run, make_run

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    one = make_run(root / "one", "run_name=first")
    two = make_run(root / "two", "run_name=second", "algorithm.seed=7", "+reward.name=math", steps=9, slope=0.05)
    return one, two


@pytest.fixture(scope="module")
def report_file(folders, tmp_path_factory):
    return write_report(folders, tmp_path_factory.mktemp("page") / "deep" / "report.html")


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


def data_of(text: str) -> dict:
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(content)


def test_the_page_is_whole_and_asks_for_nothing_else(report_file):
    text = report_file.read_text()
    assert "/* page.js */" not in text and "/* chart.js */" not in text and len(text) < 300_000
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", text) and "default-src 'none'" in text
    first, second = data_of(text)["runs"]
    assert (first["label"], second["label"]) == ("first", "second")
    assert first["series"]["train/reward"][0] == [1, 2, 3, 4, 5, 6] and second["series"]["train/reward"][1][-1] == 0.45
    assert first["series"]["train/grad_norm"][1] == [None] * 6 and first["minutes"]["6"] == 6


def test_what_a_model_wrote_stays_text(report_file):
    text = report_file.read_text()
    assert "<img" not in text and text.count("</script>") == 2
    assert data_of(text)["runs"][0]["samples"][0]["said"] == HOSTILE
    assert json.loads(embedded({"half": "\ud800"})) == {"half": "?"}


def test_secrets_of_a_run_are_not_in_its_page(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    config = json.loads((folder / "config.json").read_text())
    config["reward"]["kwargs"]["api_key"] = "sk-very-secret"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "command.txt").write_text("train +reward.kwargs.api_key=sk-very-secret\n")
    assert "sk-very-secret" not in page([read_run(folder)])


def test_long_runs_are_thinned_and_keep_their_last_step(tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "train/reward": {step}}}\n' for step in range(2, 20_000))
    steps, values = data_of(page([read_run(folder)]))["runs"][0]["series"]["train/reward"]
    assert 500 < len(steps) <= 2001 and steps[-1] == values[-1] == 19_999


def test_a_run_with_the_defaults_differs_in_no_number(tmp_path):
    """The resolved configuration has 600.0 where the file has 600."""
    data = data_of(page([read_run(make_run(tmp_path / "run", steps=1))]))
    own, defaults = data["runs"][0]["config"], data["defaults"]["grpo"]
    timeouts = [key for key in own if key.endswith("timeout_s")]
    assert len(timeouts) > 3 and {key: own[key] for key in timeouts} == {key: defaults[key] for key in timeouts}


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_other_algorithms_have_their_own_defaults_and_views(tmp_path, algorithm):
    data = data_of(page([read_run(make_run(tmp_path / "run", f"algorithm={algorithm}"))]))
    assert data["defaults"][algorithm]["algorithm.name"] == algorithm and not data["runs"][0]["samples"]
    assert any(curve["metric"] == "train/loss" for panel in data["views"][algorithm] for curve in panel["curves"])


def test_each_run_has_its_own_word_for_held_out_rewards(tmp_path):
    runs = [read_run(make_run(tmp_path / name, f"reward.binary={name}", steps=1)) for name in ("true", "false")]
    labels = [run["labels"]["validation/accuracy"] for run in data_of(page(runs))["runs"]]
    assert labels == ["held-out accuracy", "held-out reward"]


def test_a_run_that_was_killed_early_has_a_page_that_says_so(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole[: whole.rindex("{") + 20])
    (folder / "environment.json").unlink()
    (folder / "status.json").write_text("{")
    file = next((folder / "rollouts").iterdir())
    file.write_bytes(file.read_bytes()[:100])
    (folder / "error.txt").write_text("worker error: policy rank 1 failed\n\nTraceback ...\n")
    run = data_of(page([read_run(folder)]))["runs"][0]
    assert len(run["series"]["train/reward"][0]) == 3 and "policy rank 1" in run["error"]
    notes = "\n".join(run["notes"])
    assert "1 of 4 lines of metrics.jsonl" in notes and "environment.json is missing" in notes
    assert "status.json is incomplete" in notes and f"{file.name} cannot be read" in notes


@pytest.mark.parametrize(("name", "said"), [("nothing", "is not a folder"), ("empty", "is not a run")])
def test_what_is_no_run_is_an_error_that_names_it(tmp_path, name, said, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=said):
        read_run(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path / name)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert str(tmp_path / name) in error and len(error.splitlines()) == 1


def test_a_folder_with_runs_below_it_is_reported_as_these(tmp_path, capsys):
    """A run's exported model and an evaluation are no runs, and a run that is named twice is there once."""
    outputs = tmp_path / "outputs"
    for place in ("task/later", "task/earlier", "task/sweep/10", "task/sweep/9"):
        make_run(outputs / place, f"run_name={place.replace('/', '-')}", steps=1)
    for model in ("task/later/hf", "model"):
        (outputs / model).mkdir()
        (outputs / model / "config.json").write_text("{}")
    (outputs / "evaluations" / "one" / "rollouts").mkdir(parents=True)
    (outputs / "notes.txt").write_text("")
    report.main([str(outputs)])
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{outputs / 'report.html'}\n", f"runs below {outputs}: 4\n")
    names = [f"task-{name}" for name in ("earlier", "later", "sweep-9", "sweep-10")]
    assert [run["label"] for run in data_of((outputs / "report.html").read_text())["runs"]] == names
    page = write_report([outputs / "task", outputs / "task" / "later"], tmp_path / "page.html")
    assert len(data_of(page.read_text())["runs"]) == 4
    with pytest.raises(ReportError, match="and has no run below it"):
        write_report([outputs / "evaluations"])


def test_only_a_page_is_written_over(folders, tmp_path, capsys):
    mine, page_ = tmp_path / "config.json", tmp_path / "report.html"
    mine.write_text("{}")
    with pytest.raises(SystemExit) as ended:
        report.main([str(folders[0]), "--output", str(mine)])
    assert ended.value.code == 2 and f"{mine} exists and is not a report" in capsys.readouterr().err
    assert mine.read_text() == "{}"
    with pytest.raises(SystemExit) as ended:
        report.main([str(folders[0]), "--output", str(tmp_path / "report.pdf")])
    assert ended.value.code == 2 and "name a file that ends in .html" in capsys.readouterr().err
    for _ in range(2):
        assert write_report(folders[:1], page_) == page_


def test_a_page_that_cannot_be_written_does_not_fail_a_run(tmp_path, capsys):
    folder = make_run(tmp_path / "run", steps=1)
    (folder / "report.html").write_text("mine")
    write_last_report(folder, RunConsole())
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("no report was written") and f"nrl-lite report {folder}" in said
    assert (folder / "report.html").read_text() == "mine"


def test_the_verb_says_where_the_page_is(folders, tmp_path, monkeypatch, capsys):
    report.main([str(folders[0])])
    assert capsys.readouterr().out == f"{folders[0] / 'report.html'}\n"
    monkeypatch.chdir(tmp_path)
    report.main([str(folder) for folder in folders])
    assert (tmp_path / "report.html").exists()
    with pytest.raises(SystemExit) as ended:
        report.main([str(folders[0]), "--output", str(tmp_path)])
    assert ended.value.code == 1 and capsys.readouterr().err.startswith("nrl-lite report: ")


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light")])
def test_curves_are_drawn_without_an_error(tab, report_file, tmp_path, width, scheme):
    tab.open(report_file, width, 4000, scheme)
    tab.wait_for("document.querySelectorAll('#curves ~ .grid path.line').length >= 4")
    assert tab.evaluate("[...document.querySelectorAll('#nav a')].map((a) => a.textContent)") == [
        "Runs", "Curves", "Time", "Speed", "Rollout", "Memory and use", "Refit", "Samples", "Configuration",
        "Environment", "All metrics",
    ]  # fmt: skip
    # A curve of nine steps has as many points, none of them outside the picture or no number.
    lines = "document.querySelectorAll('#curves ~ .grid .card')[1].querySelectorAll('path.line')"
    path = tab.evaluate(f"{lines}[1].getAttribute('d')")
    points = [tuple(map(float, point.split(","))) for point in re.split("[ML]", path)[1:]]
    assert len(points) == 9 and all(0 <= x <= width and 0 <= y <= 210 for x, y in points)
    assert tab.evaluate("document.querySelectorAll('path.area').length") >= 4
    titles = tab.evaluate("[...document.querySelectorAll('#curves ~ .grid h3')].map((one) => one.textContent)")
    words = ("reward", "KL", "length", "truncated", "entropy", "gradient", "clipped")
    assert all(word in title for word, title in zip(words, titles, strict=True))
    assert "held-out accuracy" in tab.evaluate("document.querySelector('#runs').parentElement.textContent")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    assert tab.evaluate("document.title") == "2 runs – nemo_rl_lite"
    assert tab.evaluate(f"document.querySelector('#samples').parentElement.textContent.includes({json.dumps(HOSTILE)})")
    assert "seed" in tab.evaluate("document.querySelector('#configuration').parentElement.textContent")
    drawn = "document.querySelector('#rollout').parentElement.querySelectorAll('svg')"
    assert tab.evaluate(f"{drawn}.length") == 2 and "NaN" not in tab.evaluate(f"{drawn}[0].outerHTML")
    names = f"[...{drawn}[0].querySelectorAll('text')].map((text) => text.textContent)"
    assert {"engine 0", "engine 1", "reward", "episodes"} <= set(tab.evaluate(names))
    back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back))) < 200) == (scheme == "dark")
    tab.screenshot(tmp_path / "page.png")
    assert struct.unpack(">I", (tmp_path / "page.png").read_bytes()[16:20])[0] == width
    assert tab.problems == []


@needs_chromium
def test_policy_and_engines_are_drawn_beside_each_other(tab, tmp_path):
    width = 400
    tab.open(write_report([make_asynchronous_run(tmp_path / "run")]), width, 4000)
    part = "document.querySelector('#policy-and-engines').parentElement"
    tab.wait_for(
        f"{part}.querySelectorAll('path.area').length == 2 && {part}.querySelectorAll('path.line').length >= 4"
    )
    titles = tab.evaluate(f"[...{part}.querySelectorAll('h3')].map((title) => title.textContent)")
    assert titles[0] == "steps 1 to 3: policy waits 10 %, engines idle 58.3 %, engines paused 15 %"
    assert [title.split(" ")[0] for title in titles[1:]] == ["seconds", "age", "KL", "effective"]
    told = tab.evaluate(f"[...{part}.querySelectorAll('svg title')].map((title) => title.textContent)")
    assert {"step 2: 10 s", "step 2, train: 7 s", "engines idle: 4 s", "engines paused: 1.5 s"} <= set(told)
    assert "rollout of step 3" in told and "NaN" not in tab.evaluate(f"{part}.innerHTML")
    # All rectangles lie within the picture.
    rectangles = f"[...{part}.querySelectorAll('svg[aria-label^=steps] rect')]"
    ends = tab.evaluate(f"{rectangles}.map((one) => one.x.baseVal.value + one.width.baseVal.value)")
    assert len(ends) > 15 and max(ends) <= width
    assert tab.evaluate("document.documentElement.scrollWidth") <= width and tab.problems == []


def put(tab, selector: str, value: str, event: str) -> None:
    """Set a control as a person would."""
    find = f"document.querySelector({json.dumps(selector)})"
    tab.evaluate(f"{find}.value = {json.dumps(value)}; {find}.dispatchEvent(new Event({json.dumps(event)}))")


@needs_chromium
def test_values_are_told_where_the_pointer_is_and_runs_can_be_switched_off(tab, report_file):
    tab.open(report_file)
    tab.wait_for("document.querySelectorAll('path.line').length >= 4")
    box = tab.evaluate("document.querySelector('.chart svg rect').getBoundingClientRect().toJSON()")
    tab.move_to(box["x"] + box["width"] / 2, box["y"] + 40)
    tab.wait_for("!document.getElementById('tip').hidden")
    tip = tab.evaluate("document.getElementById('tip').textContent")
    assert tip.startswith(("step 4", "step 5"))
    assert "first: training reward" in tip and "second: training reward" in tip
    before = tab.evaluate("document.querySelectorAll('#curves ~ .grid path.line').length")
    tab.evaluate("document.querySelector('.run input').click()")
    tab.wait_for(f"document.querySelectorAll('#curves ~ .grid path.line').length < {before}")
    put(tab, "#smooth", "0.9", "input")
    put(tab, "#axis", "minutes", "change")
    tab.evaluate("document.getElementById('log').click(); document.getElementById('theme').click()")
    tab.wait_for("[...document.querySelectorAll('.chart text')].some((text) => text.textContent.endsWith(' min'))")
    tab.evaluate("document.querySelectorAll('details').forEach((block) => { block.open = true })")
    tab.wait_for("document.querySelectorAll('details .chart').length >= 8")
    put(tab, "input[type=search]", "kl", "input")
    cards = "[...document.querySelectorAll('details .card')].filter((card) => card.offsetParent)"
    shown = tab.evaluate(f"{cards}.map((card) => card.querySelector('h3').textContent)")
    assert shown == ["train/kl_penalty"] and tab.problems == []


@needs_chromium
def test_a_page_of_hardly_anything_has_no_error_either(tab, tmp_path):
    folder = make_run(tmp_path / "run", steps=1)
    for name in ("metrics.jsonl", "config.json", "environment.json"):
        (folder / name).unlink()
    (folder / "metrics.jsonl").write_text("")
    tab.open(write_report([folder]))
    assert "No step has been logged yet" in tab.evaluate("document.body.textContent") and tab.problems == []
