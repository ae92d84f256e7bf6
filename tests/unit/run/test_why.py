"""`nrl-lite why`: the tokens' shares of a step's loss, from the files of its run."""

import json
import re

import pytest

from nemo_rl_lite import why
from tests.unit.run.browser import CHROMIUM, browser
from tests.unit.run.trained_step import PROMPTS, SAMPLES, STEP, make_trained_step

LOSS = "algorithm.loss_fn"
CORRECTS = f"{LOSS}.use_importance_sampling_correction=true"
TYPE, BOUND = f"{LOSS}.truncated_importance_sampling_type", f"{LOSS}.truncated_importance_sampling_ratio=1.2"
VARIANTS = {
    "default": [],
    "no KL": [f"{LOSS}.reference_policy_kl_penalty=0"],
    "strong KL": [f"{LOSS}.reference_policy_kl_penalty=0.5"],
    "KL in the reward": [f"{LOSS}.use_kl_in_reward=true", f"{LOSS}.reference_policy_kl_type=k1"],
    "sequence means": [f"{LOSS}.token_level_loss=false"],
    "constant length": [f"{LOSS}.token_level_loss=constant"],
    "GSPO": [f"{LOSS}.token_level_loss=false", f"{LOSS}.sequence_level_importance_ratios=true"],
    "GSPO-token": [f"{LOSS}.token_level_loss=false", f"{LOSS}.sequence_level_importance_ratios=token"],
    "dual clip": [f"{LOSS}.ratio_clip_c=1.1"],
    **{name: [f"{LOSS}.policy_loss={name}"] for name in ("cispo", "sapo", "dppo_tv", "dppo_kl", "reinforce")},
    "KL-Cov": [f"{LOSS}.policy_loss=kl_cov", f"{LOSS}.kl_cov_ratio=0.2"],
    "truncated": [CORRECTS, BOUND],
    "IcePop": [CORRECTS, f"{TYPE}=icepop", BOUND],
    "masked sequences": [CORRECTS, f"{TYPE}=seq-mask-tis", BOUND],
    "rejected sequences": [f"{LOSS}.sequence_rejection_ratio=1.05"],
    "entropy": [f"{LOSS}.entropy_coef=0.1"],
    "top entropy": [f"{LOSS}.top_entropy_quantile=0.4"],
    "likelihood": [f"{LOSS}.positive_example_nll_weight=0.3"],
    "truncated responses": ["algorithm.overlong_filtering=true"],
}


def data_of(file) -> dict:
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(), re.S)
    return json.loads(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_trained_step(tmp_path_factory.mktemp("runs") / "one", CORRECTS, f"{TYPE}=icepop", BOUND)


@pytest.fixture(scope="module")
def page(folder):
    why.main([str(folder), "--step", str(STEP), "--sample", "2"])
    return folder / f"why-step-{STEP}.html"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_shares_of_all_tokens_are_the_logged_loss(tmp_path, name):
    folder = make_trained_step(tmp_path / "run", *VARIANTS[name])
    why.main([str(folder), "--step", str(STEP)])
    data = data_of(folder / f"why-step-{STEP}.html")
    total, logged = data["totals"]["sum of all tokens"], data["totals"]["logged loss"]
    scale = sum(abs(share) for one in data["samples"] for share in one["parts"])
    assert total == pytest.approx(logged, abs=1e-6 * scale) and scale > 0
    # The step that was skipped is left out of both.
    assert len(data["losses"]) == 3 and any("Skipped" in text for text in data["coverage"])


def test_samples_and_tokens_add_up_and_say_what_they_follow_from(page):
    data = data_of(page)
    assert len(data["samples"]) == PROMPTS * SAMPLES and data["tokens"][0]["number"] == 2
    assert sum(one["gradient"] for one in data["samples"]) == pytest.approx(1)
    assert sum(one["gradient"] for one in data["prompts"]) == pytest.approx(1)
    samples = {one["number"]: one for one in data["samples"]}
    for own in data["tokens"]:
        assert sum(own["columns"]["gradient"]) == pytest.approx(samples[own["number"]]["gradient"], rel=1e-4)
        # The prompt has two tokens.
        assert own["version"][:4] == [-1, -1, STEP - 2, STEP - 2] and set(own["version"][4:]) == {STEP - 1}
    # The reward of sample 2 failed.
    assert samples[2]["gradient"] == 0 and samples[2]["tokens"] == 0
    own = next(one for one in data["tokens"] if samples[one["number"]]["dropped"])
    dropped = [place for place, mark in enumerate(own["marks"]) if mark & 8]
    assert len(dropped) == samples[own["number"]]["dropped"]
    assert all(own["columns"]["weight"][place] == 0 for place in dropped)
    assert all(own["columns"]["policy term"][place] == 0 for place in dropped)
    assert data["kinds"]["policy term dropped"] == sum(one["dropped"] for one in data["samples"])


def test_a_clipped_token_has_no_gradient(tmp_path):
    options = [f"{LOSS}.{name}" for name in ("reference_policy_kl_penalty=0", "ratio_clip_max=0.01")]
    folder = make_trained_step(tmp_path / "run", *options, f"{LOSS}.ratio_clip_min=0.01")
    why.main([str(folder), "--step", str(STEP)])
    tokens = data_of(folder / f"why-step-{STEP}.html")["tokens"]
    # The first rows are clipped in one of two optimizer steps, the last ones only trained on-policy or clipped.
    last = [own for own in tokens if own["number"] >= 4 and any(own["trained"])]
    clipped = [own["columns"]["gradient"][place] for own in last for place, mark in enumerate(own["marks"]) if mark & 3]
    assert clipped and set(clipped) == {0.0}


def cells(line: str) -> list[str]:
    """The cells of a table's line."""
    return [one.strip() for one in line.replace("┃", "│").strip("│").split("│")]


def test_the_terminal_has_the_largest_shares(folder, capsys):
    why.main([str(folder), "--step", str(STEP), "--output", str(folder / "mine.html")])
    said = capsys.readouterr().out
    for title in ("loss", "tokens", "prompts with the largest gradient", "tokens with the largest mismatch"):
        assert f"\n{title}\n" in f"\n{said}"
    assert said.endswith(f"{folder / 'mine.html'}\n") and (folder / "mine.html").exists()
    tables = [list(map(cells, table.splitlines())) for table in said.split("┏")[1:]]
    of_gradient = [[row for row in table if len(row) == len(table[1])] for table in tables if "gradient" in table[1]]
    assert len(of_gradient) == 4
    for headers, *rows in of_gradient:
        assert rows and all(row[headers.index("gradient")].endswith(" %") for row in rows)
    headers, first, *_ = next(table for table in of_gradient if table[0][0] == "sample")
    shown, largest = dict(zip(headers, first, strict=True)), data_of(folder / "mine.html")["samples"][0]
    assert (shown["sample"], shown["problem"]) == (str(largest["number"]), str(largest["problem"]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "9"], f"has no samples of step 9; it has steps {STEP} to {STEP}"),
        (["--step", str(STEP), "--output", "FOLDER/config.json"], "config.json exists and is not a why"),
        (["--step", str(STEP), "--sample", "8"], f"--sample 8: step {STEP} has samples 0 to 7"),
    ],
)
def test_bad_arguments_are_one_line(folder, arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        why.main([str(folder), *(one.replace("FOLDER", str(folder)) for one in arguments)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and len(error.splitlines()) == 1


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_shows_the_tokens_of_a_chosen_sample(page, tmp_path, width):
    with browser(tmp_path) as tab:
        tab.open(page, width, 3000)
        tab.wait_for("document.querySelectorAll('.text span').length > 4")
        assert "Sample 2" in tab.evaluate("document.querySelector('#tokens + .card h3').textContent")
        other = tab.evaluate("document.querySelectorAll('tr.open')[0].dataset.sample")
        tab.evaluate("document.querySelectorAll('tr.open')[0].click()")
        assert f"Sample {other}:" in tab.evaluate("document.querySelector('#tokens + .card h3').textContent")
        box = tab.evaluate("document.querySelectorAll('.text span')[3].getBoundingClientRect().toJSON()")
        tab.move_to(box["x"] + 2, box["y"] + 5)
        tab.wait_for("!document.getElementById('tip').hidden")
        assert "weights of step" in tab.evaluate("document.getElementById('tip').textContent")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.problems == []
