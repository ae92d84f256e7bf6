"""Summary of a step's loss on the terminal, and its page. Shapes: N tokens of all rows, S samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_lite.config.schema import Config
from nemo_rl_lite.models.embedded import NAME, embedded_folder
from nemo_rl_lite.models.shape import is_hub_name
from nemo_rl_lite.observability.console import RunConsole
from nemo_rl_lite.observability.sinks import text_of
from nemo_rl_lite.report.page import check_output, filled
from nemo_rl_lite.report.why import Explained, Trained

# Samples whose tokens the page has, rows of its tables, and rows of the terminal's.
TOKENS_OF, ROWS, SHOWN = 12, 200, 5
_DIGITS, _CHARACTERS = 6, 400
_FILE = "tokenizer.json"
TITLE = b"<title>nemo_rl_lite why</title>"
Piece = Callable[[int], str]


class Account:
    """Contributions of a step's samples and tokens to its loss."""

    def __init__(self, trained: Trained, explained: Explained, logged: float | None):
        """`logged`: the step's loss in the metrics."""
        self.trained, self.explained, self.logged = trained, explained, logged
        rows = trained.rows
        self.sample_of_token = np.repeat(trained.sample_of_row, rows.lengths)
        self.count = len(trained.samples["sample"])
        self.mismatch = np.where(rows.mask, trained.known["previous_logprobs"] - rows.generation_logprobs, 0.0)
        self.gradient_S = self.by_sample(explained.gradient)
        self.total_gradient = max(float(explained.gradient.sum()), 1e-30)

    def by_sample(self, values: np.ndarray) -> np.ndarray:
        """Sum tokens' values over samples, [S]."""
        return np.bincount(self.sample_of_token, values, self.count)

    def totals(self) -> dict[str, float | None]:
        """Return the loss by part, and the logged loss."""
        parts = {name: float(values.sum()) for name, values in self.explained.parts.items()}
        return parts | {"sum of all tokens": float(self.explained.shares.sum()), "logged loss": self.logged}

    def kinds(self) -> dict[str, int]:
        """Return the number of sampled tokens, and of those in states that change their gradient."""
        own, mask = self.explained, self.trained.rows.mask
        sampled = self.trained.versions >= 0
        return {
            "sampled": int(sampled.sum()),
            "left out of the loss": int((sampled & ~mask).sum()),
            "without an advantage": int((mask & (own.advantages == 0)).sum()),
            "clipped, ratio too low": int(own.low.sum()),
            "clipped, ratio too high": int(own.high.sum()),
            "correction weight truncated": int(own.truncated.sum()),
            "policy term dropped": int(own.dropped.sum()),
            "without any gradient": int((mask & (own.gradient == 0)).sum()),
        }

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Samples in the order of their weight in the gradient."""
        own, mask, places = self.explained, self.trained.rows.mask, self.trained.samples
        age = np.where(mask, np.asarray(self.trained.rows.ages), 0)
        worst = np.zeros(self.count)
        np.maximum.at(worst, self.sample_of_token, np.abs(self.mismatch))
        oldest = np.zeros(self.count, np.int64)
        np.maximum.at(oldest, self.sample_of_token, age)
        counts = {"tokens": mask, "clipped": own.low | own.high, "dropped": own.dropped}
        counted = {name: self.by_sample(values).astype(int) for name, values in counts.items()}
        parts = {name: self.by_sample(values) for name, values in own.parts.items()}
        return [
            {
                "number": int(one),
                **{name: places[name][one] for name in ("problem", "sample", "reward", "advantage", "ending")},
                "gradient": float(self.gradient_S[one]) / self.total_gradient,
                "parts": [float(values[one]) for values in parts.values()],
                **{name: int(values[one]) for name, values in counted.items()},
                "mismatch": float(worst[one]),
                "age": int(oldest[one]),
            }
            for one in np.argsort(-self.gradient_S, kind="stable").tolist()
        ]

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """Prompts in the order of their weight in the gradient."""
        problems = np.array(self.trained.samples["problem"])
        gradient, loss = self.gradient_S, self.by_sample(self.explained.shares)
        found = [
            {
                "problem": int(one),
                "gradient": float(gradient[problems == one].sum()) / self.total_gradient,
                "loss": float(loss[problems == one].sum()),
                "prompt": text_of([*self.trained.samples["prompt"][int(np.argmax(problems == one))]])[:_CHARACTERS],
            }
            for one in np.unique(problems)
        ]
        return sorted(found, key=lambda one: -one["gradient"])

    def tokens(self, sample: int, piece: Piece) -> dict[str, Any]:
        """Return a sample's tokens by column."""
        own = np.flatnonzero(self.sample_of_token == sample)
        rows, found = self.trained.rows, self.explained
        columns = {
            "gradient": found.gradient / self.total_gradient,
            "advantage": found.advantages,
            "ratio": found.ratio,
            "weight": found.weights,
            "engine": np.asarray(rows.generation_logprobs),
            "policy": self.trained.known["previous_logprobs"],
            **found.parts,
        }
        marks = found.low + 2 * found.high + 4 * found.truncated + 8 * found.dropped
        return {
            "number": sample,
            "texts": [piece(int(token)) for token in rows.tokens[own]],
            "version": self.trained.versions[own].tolist(),
            "trained": rows.mask[own].astype(int).tolist(),
            "marks": marks[own].tolist(),
            "columns": {name: _rounded(values[own]) for name, values in columns.items()},
        }

    def top(self, values: np.ndarray, piece: Piece, count: int = SHOWN) -> list[dict[str, Any]]:
        """Return the tokens with the largest values: sample, place in the sample, and text with its context."""
        tokens, found = self.trained.rows.tokens, []
        for place in np.argsort(-values, kind="stable")[:count].tolist():
            if not values[place]:
                break
            sample = int(self.sample_of_token[place])
            first = int(np.searchsorted(self.sample_of_token, sample))
            before = "".join(piece(int(token)) for token in tokens[max(first, place - 8) : place])
            found.append(
                {
                    "number": sample,
                    "place": place - first,
                    "before": before,
                    "text": piece(int(tokens[place])),
                    "gradient": float(self.explained.gradient[place]) / self.total_gradient,
                    "advantage": float(self.explained.advantages[place]),
                    "ratio": float(self.explained.ratio[place]),
                    "mismatch": float(self.mismatch[place]),
                }
            )
        return found


def _rounded(values: np.ndarray) -> list[float | None]:
    each = values.astype(float).tolist()
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in each]


def pieces(run: Path, config: Config) -> Piece:
    """Return the text of a token by its id; the id itself without a tokenizer on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    name = config.policy.model_name
    cached = try_to_load_from_cache(name, _FILE) if is_hub_name(name) else None
    places = [run / "hf" / _FILE, run / "model" / _FILE, Path(name).expanduser() / _FILE]
    places += [embedded_folder(config) / _FILE] if name == NAME else []
    places += [Path(cached)] if isinstance(cached, str) else []
    file = next((one for one in places if one.is_file()), None)
    if file is None:
        return lambda token: f"[{token}]"
    tokenizer, known = Tokenizer.from_file(str(file)), dict[int, str]()

    def piece(token: int) -> str:
        if token not in known:
            known[token] = tokenizer.decode([token], skip_special_tokens=False)
        return known[token]

    return piece


def coverage(account: Account, config: Config) -> list[str]:
    """Return sentences on what the numbers cover."""
    own = account.explained
    found = [
        f"Optimizer steps of this rollout: {len(own.losses)}. Shares and gradients are means over them; ratio and "
        "bounds are the most extreme ones."
    ]
    if own.skipped:
        found.append(f"Skipped optimizer steps, whose gradient was not finite: {own.skipped}. They are left out.")
    if config.algorithm.loss_fn.policy_loss in ("clip_cov", "kl_cov"):  # pyrefly: ignore
        found.append("The policy term chooses tokens at random; the choice here is another one.")
    found.append(
        "Gradient: |d loss / d logprob|, the weight of a token's direction in the policy gradient. Gradients through "
        "the entropy bonus are not part of it."
    )
    return found


def write_why(run: Path, step: int, account: Account, config: Config, wanted: Sequence[int], output: Path) -> Piece:
    """Write the page, and return the texts of tokens. It has the tokens of the samples with the largest weight in the
    gradient, of the one with the largest mismatch, and of the `wanted`. Raises ReportError: `output` is another file.
    """
    check_output(output, "why", TITLE)
    piece, samples = pieces(run, config), account.samples
    worst = max(samples, key=lambda one: one["mismatch"])["number"]
    chosen = dict.fromkeys([*wanted, *(one["number"] for one in samples[:TOKENS_OF]), worst])
    data = {
        "run": str(run),
        "step": step,
        "totals": account.totals(),
        "kinds": account.kinds(),
        "coverage": coverage(account, config),
        "losses": list(account.explained.losses),
        "parts": list(account.explained.parts),
        "prompts": account.prompts[:ROWS],
        "samples": [one for place, one in enumerate(samples) if place < ROWS or one["number"] in chosen],
        "all": len(samples),
        "top": account.top(account.explained.gradient, piece, 20),
        "far": account.top(np.abs(account.mismatch), piece, 20),
    }
    data = _finite(data) | {"tokens": [account.tokens(one, piece) for one in chosen]}
    output.write_text(filled("why.html", ("page.css", "why.css", "why.js"), data), encoding="utf-8")
    return piece


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by None."""
    if isinstance(value, Mapping):
        return {name: _finite(own) for name, own in value.items()}
    if isinstance(value, list):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_why(account: Account, piece: Piece, console: RunConsole) -> None:
    """Print the summary."""
    console.table("loss", ["part", "loss"], [[name, _number(value)] for name, value in account.totals().items()])
    kinds = account.kinds()
    most = max(kinds["sampled"], 1)
    rows = [[name, f"{count:,}", _percent(count / most)] for name, count in kinds.items()]
    console.table("tokens", ["", "tokens", "share"], rows)
    samples, prompts = account.samples, account.prompts
    each = [[str(one["problem"]), _percent(one["gradient"]), _number(one["loss"])] for one in prompts[:SHOWN]]
    console.table("prompts with the largest gradient", ["problem", "gradient", "loss"], each)
    names = ("reward", "advantage", "tokens", "clipped", "dropped", "mismatch")
    each = [
        [str(one["number"]), str(one["problem"]), _percent(one["gradient"]), *(_number(one[name]) for name in names)]
        for one in samples[:SHOWN]
    ]
    console.table("samples with the largest gradient", ["sample", "problem", "gradient", *names], each)
    for title, values in (("gradient", account.explained.gradient), ("mismatch", np.abs(account.mismatch))):
        names = ("advantage", "ratio", "mismatch")
        each = [
            [
                f"{one['number']}/{one['place']}",
                repr(one["text"]),
                _percent(one["gradient"]),
                *(_number(one[name]) for name in names),
            ]
            for one in account.top(values, piece)
        ]
        console.table(f"tokens with the largest {title}", ["sample/place", "token", "gradient", *names], each)


def _percent(share: float) -> str:
    """Return a share in the format of the page."""
    return f"{100 * share:.2g} %" if 0 < share < 1e-3 else f"{share:.1%}".replace("%", " %")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
