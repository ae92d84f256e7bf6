"""Compare an answer with the reference as text, then by exact value, then with math-verify. docs/math_reward.md has a
table of equal forms."""

import logging
import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, Float, N, Number, floor, log

from nemo_rl_lite.rewards.answers import final_text, find_answer, unwrapped
from nemo_rl_lite.rewards.numbers import plain, read_number

# math-verify warns that its time limits are off: they need the main thread and do not interrupt C code. The reward's
# process has its own time limit (system/pool.py).
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Patterns of equivalent notations and their replacements.
_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in [
        (r"^\s*[\"'“‘]([^\"'“”‘’]*)[\"'”’]\s*$", r"\1"),
        (r"(?<=\d)(?:\{,\}|\\,|\\ |\\;|\\:|~|\\!|,\\!)(?=\d{3}(?!\d))", ","),
        (r"(?<!\\)\\(?:[,;:! ]|quad|qquad|left|right|[bB]ig+[lr]?|displaystyle|limits)(?![A-Za-z])|~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\color\s*\{[^{}]*\}|(?<=\d)\s*\^?\s*\{?\\(?:text|mathrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\}?", ""),
        (r"^\s*\\\{\s*[a-z]\s*(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)\s*\(?)(\d+(?:\.\d+)?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)",
            r"\1{\\frac{\2\\pi}{180}}",
        ),
        (r"^\s*\\text\s*\{[^{}]*(?:\bis|:)\s*\}(?=\s*\S)", ""),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|bf|rm|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|\\deg\b|°|º|\bdegrees?\b)\s*([CF]\b)?", r" \1"),
        (r"\\%|\bper ?cent\b", "%"),
        (r"\\varnothing|\\phi(?=\s*$)|∅|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])|[×·∙⋅]", r"\\cdot "),
        (r"π", r"\\pi "),
        (r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"∞|(?<![\\A-Za-z])(?:infinity|inf)\b", r"\\infty "),
        (r"\\leqslant|\\leq(?![A-Za-z])|≤|<=", r"\\le "),
        (r"\\geqslant|\\geq(?![A-Za-z])|≥|>=", r"\\ge "),
        (r"∪", r"\\cup "),
        (r"∈", r"\\in "),
        (r"±|\+/-", r"\\pm "),
        (r"(?<![\w)])\+(?=\\infty)", ""),
        (r"\\langle|⟨", "("),
        (r"\\rangle|⟩", ")"),
        (r"\\(?:approx|simeq|doteq|equiv)(?![A-Za-z])|≈|≡", "="),
        (r"(?<=\d)\s*(?:\\colon|to)\s*(?=\d)", ":"),
        (r"(?<=\d)\s*\\frac\s*\{\s*([A-Za-z]+)\s*\}\s*\{\s*([A-Za-z]+\s*(?:\^\{?\d\}?)?)\s*\}", r" \1/\2"),
        (r"\^\s*(?:(-?\d{2,})|\(([^()]*)\))", r"^{\1\2}"),
        (r"(?<=[\d)])_\{(\d+)\}", r"_\1"),
        (r"\b(?:square|sq\.?) ([^\W\d_]+)", r"\1^2"),
        (r"\bcubic ([^\W\d_]+)", r"\1^3"),
        (r"\s+", " "),
        (r"(?<![\w,]) | (?!\w)", ""),
    ]
]
# "12 34", 0xff, 101_2 and words: math-verify would read products, and "no" would equal "on".
_NO_PRODUCT = re.compile(
    r"(?<![\d_])\d+ \d|\d'|^\(?\d[\dA-F]*\)?_|\b0[xbo][\da-fA-F]+"
    r"|^[A-Za-z' -]*(?:[A-Za-z]{3}|\b(?:[Nn]o|[Oo]n|[Uu]p|[Uu]s)\b)[A-Za-z' -]*$"
)
# Maximum characters of an expression: 3000 open brackets take math-verify half a minute.
_LONGEST = 2000
_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
# A choice and its value. "(A) or (B)" does not count.
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s?)?(?:\(([A-Za-z])\)[:.]?|([A-Z])(?:[:.)]|$))"
    r"((?!or\b|and\b|[,;/&]|[A-Z]\b|.*\([A-Z]\)).*)"
)
_TIME = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?(?:\s?([ap])\.?\s?m\.?)?", re.IGNORECASE)
_ABOUT = re.compile(r"\\(?:approx|simeq|doteq)(?![A-Za-z])|≈")
_RATIO = re.compile(r"\d{1,40}(?:\.\d{1,40})?(?:\s?:\s?\d{1,40}(?:\.\d{1,40})?)+")
_INEQUALITY = re.compile(r"[A-Za-z](<|>|\\le ?|\\ge ?)([^<>=]+)")
# Left side of an equation that names its right side: x, a_1, f(x), \theta, |AB|, Area, (x,y).
_NAME = re.compile(
    r"(?:\\?[A-Za-z ]+|\|[A-Z]+\||\([a-z](?:,\s?[a-z])+\)|\\frac\{d\w*\}\{d\w\}|\\(?:vec|hat|overline)\{\w+\})"
    r"'?(?:\^\{-1\})?(?:_\{?\w+\}?)?(?:\([a-z](?:,\s?[a-z])*\))?"
)
_MEMBER = re.compile(r"[A-Za-z]\\in ?(?=[(\[{\\])")
_UNIT_NAMES = {
    "m": "m meter metre",
    "cm": "cm centimeter centimetre",
    "mm": "mm millimeter millimetre",
    "km": "km kilometer kilometre",
    "in": "in inch inche",
    "ft": "ft foot feet",
    "mile": "mi mile",
    "kg": "kg kilogram kilo",
    "g": "g gram gramme",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "$": "$ dollar usd buck",
    "cent": "cent ¢",
    "€": "€ euro eur",
    "£": "£ pound gbp",
    "l": "l liter litre",
    "ml": "ml milliliter millilitre",
    "C": "C celsius",
    "F": "F fahrenheit",
}
_UNITS = {alias: name for name, aliases in _UNIT_NAMES.items() for alias in aliases.split()}
# Single letters that are units rather than variables, and mathematical words that are not units.
_LETTERS = "[mgshLCF]"
_NO_UNIT = r"(?:and|or|sin|cos|tan|cot|sec|csc|ln|log|exp|mod|sqrt|pi|in|max|min|gcd|lcm|if|for|is|frac)\b"
_SCALE = r"(?:thousand|million|billion|trillion)\b"
_UNIT = re.compile(
    rf"(?P<value>.*[\d)}}\]](?:\s{_SCALE})?)"
    rf"(?P<unit>\s?(?:[€£¥₹¢]|\\?\$)|\s*(?<!\\)(?!{_SCALE})(?!{_NO_UNIT}(?!\s*$))"
    rf"(?:[^\W\d_]{{2,}}+|(?<=[\d)}}\]] ){_LETTERS})\.?(?:\s?[/·]?\s?[^\W\d_]++|\s?\^\{{?-?\d\}}?)*)"
)
_MONEY = re.compile(r"(?P<minus>-?)(?P<sign>\\?\$|[€£¥₹]|USD |EUR |Rs\.? ?)(?P<value>-?\d.*)")


def same_value(response: str, answer: str) -> float:
    """Return 1 if the response's final answer, or the whole text after the reasoning, equals the reference, else 0.
    Raises ValueError: the reference answer is empty."""
    if not _normal(answer):
        raise ValueError(f"the reference answer {answer!r} is empty")
    whole, stated = final_text(response), find_answer(response)
    if whole and _normal(whole) == _normal(answer):
        return 1.0
    return float(bool(stated) and same_answer(stated, answer))


def same_answer(stated: str, reference: str) -> bool:
    """Compare an answer with the reference as text, by exact value, and with math-verify."""
    first, second = _normal(stated), _normal(unwrapped(reference))
    choice, expected = _CHOICE.fullmatch(first), _CHOICE.fullmatch(second)
    if choice and expected:
        return _letter(choice) == _letter(expected)
    firsts, seconds = _readings(first, choice), _readings(second, expected)
    # Either side of an approximation may match.
    if len(sides := _ABOUT.split(stated)) > 1:
        firsts.append(_normal(sides[0]))
    return any(_same(one, other) for one in firsts for other in seconds)


def _letter(choice: re.Match[str]) -> str:
    return (choice[1] or choice[2]).upper()


def _readings(text: str, choice: re.Match[str] | None) -> list[str]:
    """Return the letter and the value of "(B) 12", or the text."""
    return [part for part in (_letter(choice), choice[3]) if part] if choice else [text]


def _normal(text: str) -> str:
    text = unicodedata.normalize("NFC", plain(text))
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    return text.strip("*`$ ").rstrip(".,;: ")


def _same(stated: str, reference: str, is_item: bool = False) -> bool:
    """Compare normalised answers by the first rule that applies. In list items nouns count: 3 boys, 4 girls."""
    if stated == reference or (_WORD.search(reference) and _words(stated) == _words(reference)):
        return True
    time, other_time = _TIME.fullmatch(stated), _TIME.fullmatch(reference)
    if time or other_time:
        return bool(time and other_time and _same_time(time, other_time))
    stated, reference = _union(stated), _union(reference)
    (first, unit), (second, other) = _without_unit(stated), _without_unit(reference)
    # Unknown nouns do not count: 12 apples equal 12 pieces.
    units_fit = not unit or not other or unit == other or not (is_item or (_is_known(unit) and _is_known(other)))
    if _RATIO.fullmatch(first) or _RATIO.fullmatch(second):
        return units_fit and _ratio(first) == _ratio(second)
    value, expected = read_number(first), read_number(second)
    if value and expected:
        return units_fit and value.equals(expected)
    items, others = _listed(stated), _listed(reference)
    if items and others:
        return _same_lists(items, others)
    # An interval may equal an inequality. Other lists equal only lists.
    if any(one and one[0] in ("", "{}") and not number for one, number in ((items, value), (others, expected))):
        return False
    equations = _equation(stated), _equation(reference)
    if any(equations):
        sides = _sides(*equations, stated, reference)
        return _same(*sides, is_item) if sides else all(equations) and _same_mathematics(first, second)
    return units_fit and _same_mathematics(first, second)


def _union(text: str) -> str:
    """Convert "x<1 or x>2" to a union of intervals; other texts stay unchanged."""
    parts = [_INEQUALITY.fullmatch(part) for part in text.split(" or ")]
    if len(parts) < 2 or not all(parts):
        return text
    return r"\cup ".join(
        f"(-\\infty,{one[2]}{']' if 'le' in one[1] else ')'}"
        if one[1][0] == "<" or "le" in one[1]
        else f"{'[' if 'ge' in one[1] else '('}{one[2]},\\infty)"
        for one in parts
        if one
    )


def _words(text: str) -> str:
    return re.sub(r"^(?:the|an?) ", "", text.casefold().rstrip("?!"))


def _same_time(stated: re.Match[str], reference: re.Match[str]) -> bool:
    """Compare times of day. 3:05 equals 3:05 p.m., because the question may imply the half."""
    (hour, minute, half), (other_hour, other_minute, other_half) = _clock(stated), _clock(reference)
    if bool(half) == bool(other_half):
        return (hour, minute) == (other_hour, other_minute)
    bare = other_hour if half else hour
    return minute == other_minute and (hour == other_hour or (bare <= 12 and (hour - other_hour) % 12 == 0))


def _clock(time: re.Match[str]) -> tuple[int, tuple[int, int], str]:
    """Return the hour (0 to 23), minute and second, and "a" or "p"."""
    half = (time[4] or "").lower()
    hour = int(time[1]) % 12 + 12 * (half == "p") if half else int(time[1])
    return hour, (int(time[2]), int(time[3] or 0)), half


def _without_unit(text: str) -> tuple[str, str | None]:
    if money := _MONEY.fullmatch(text):
        return money["minus"] + _without_unit(money["value"])[0], _unit_name(money["sign"])
    found = _UNIT.fullmatch(text)
    return (found["value"].strip(), _unit_name(found["unit"])) if found else (text, None)


def _unit_name(text: str) -> str | None:
    """Return cm^2 for "square centimeters", $ for dollars, the last word otherwise; None for "units"."""
    parts = re.findall(r"[^\W\d_]+|\^\{?-?\d|/|[€£¥₹¢$]", text.replace(" per ", "/"))
    singular = [(part, part.casefold(), part.casefold().removesuffix("s")) for part in parts]
    names = [next((_UNITS[form] for form in forms if form in _UNITS), forms[-1].replace("{", "")) for forms in singular]
    found = "".join(names) if any(part[0] in "/^" for part in parts) else names[-1]
    return None if found.startswith("unit") else found


def _is_known(unit: str) -> bool:
    return any(mark in unit for mark in "/^") or unit in _UNIT_NAMES


def _ratio(text: str) -> list[Fraction] | None:
    """Return the parts of 3:2 or 3/2, divided by the last; None for other texts."""
    number = read_number(text)
    parts = [Fraction(part.strip()) for part in text.split(":")] if _RATIO.fullmatch(text) else []
    parts = parts or ([number.value, Fraction(1)] if number else [])
    return [part / parts[-1] for part in parts] if parts and parts[-1] else None


def _listed(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets and items of a list; None for a single expression."""
    text = _MEMBER.sub("", text).replace(r"\{", "{").replace(r"\}", "}")
    brackets = text[:1] + text[-1:] if text[:1] in set("([{") and text[-1:] in set(")]}") else ""
    if not _is_closed(text[1:-1]):
        brackets = ""
    items = _split(text[1:-1] if brackets else text)
    if not brackets:
        items = [one for item in items for one in re.split(r"\s?\b(?:and|or)\b\s?", item) if one]
        items = [re.sub(r"\\pm ?", sign, item) for item in items for sign in ("+-" if r"\pm" in item else "+")]
    return (brackets, items) if len(items) > 1 else None


def _is_closed(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """Split at semicolons outside brackets, or else at commas."""
    depth, places = 0, {";": list[int](), ",": list[int]()}
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign in places and depth == 0:
            places[sign].append(place)
    ends = [*(places[";"] or places[","]), len(text)]
    starts = [0, *(end + 1 for end in ends[:-1])]
    parts = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    return [part for part in parts if part]


def _same_lists(stated: tuple[str, list[str]], reference: tuple[str, list[str]]) -> bool:
    """Compare item by item, in any order without brackets and in braces. Two items in brackets may be an interval, so
    the brackets must be equal."""
    (first, items), (second, expected) = stated, reference
    if len(items) != len(expected):
        return False
    is_set = [one in ("", "{}") for one in (first, second)]
    if all(is_set):
        left = list(expected)
        for item in items:
            found = next((one for one in left if _same(item, one, is_item=True)), None)
            if found is None:
                return False
            left.remove(found)
        return True
    if "{}" in (first, second) or (len(items) == 2 and first and second and first != second):
        return False
    return all(map(_same, items, expected))


def _sides(
    stated: tuple[str, str] | None, reference: tuple[str, str] | None, first: str, second: str
) -> tuple[str, str] | None:
    """Return the texts to compare if at least one is an equation, or None to compare the equations themselves. Right
    sides are compared if the left sides name the same thing, or if only one text is an equation."""
    if stated and reference:
        same = stated[0] == reference[0] or _are_functions(stated[0], reference[0])
        return (stated[1], reference[1]) if same else None
    if stated:
        # Every equation can be written as = 0.
        return (stated[1], second) if stated[1] != "0" or _NAME.fullmatch(stated[0]) else None
    return (first, reference[1]) if reference and _NAME.fullmatch(reference[0]) else None


def _are_functions(first: str, second: str) -> bool:
    """Return True if both are names and one is longer than a letter: f(x) and y, Area and A."""
    return bool(_NAME.fullmatch(first) and _NAME.fullmatch(second)) and max(len(first), len(second)) > 1


def _equation(text: str) -> tuple[str, str] | None:
    """Return the first and last side of a chain of equations, with a name on the left if there is one."""
    text = _MEMBER.sub("x=", text)
    sides = [side.strip() for side in re.split(r"(?<![<>!=])=(?!=)", text.replace("&=", "="))]
    if len(sides) < 2 or not all(sides) or len(_split(text)) > 1 or re.search(r"\b(?:and|or)\b", text):
        return None
    first, last = sides[0], sides[-1]
    return (last, first) if re.fullmatch("[a-zA-Z]", last) and not _NAME.fullmatch(first) else (first, last)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    """Parse a normalised expression with math-verify; [] if that fails."""
    if len(text) > _LONGEST or _NO_PRODUCT.search(text):
        return []
    latex = re.sub(r"\band\b|\bor\b", ",", text.replace("%", r"\%"))
    latex = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)", r"\1 \\cdot 10^{\2}", latex)
    kinds = LatexExtractionConfig(), ExprExtractionConfig()
    return parse(f"${latex}$", kinds, parsing_timeout=0, raise_on_error=False)


def _same_mathematics(stated: str, reference: str) -> bool:
    try:
        return any(_same_values(one, other) for one in _parsed(stated) for other in _parsed(reference))
    except Exception:  # math-verify fails on some, such as 1/0
        return False


def _same_values(stated: Any, reference: Any) -> bool:
    if not isinstance(stated, Basic) or not isinstance(reference, Basic):
        return verify(reference, stated, timeout_seconds=0)
    has_floats = stated.has(Float) or reference.has(Float)
    if getattr(stated, "is_number", False) and getattr(reference, "is_number", False):
        first, second = stated.doit(), reference.doit()
        if first.is_Rational and second.is_Rational:
            return bool(first == second)
        first, second = N(first, 40), N(second, 40)
        most = (1e-6 if has_floats else 1e-30) * abs(second)
        return bool(first.is_finite and second.is_finite and abs(first - second) <= most)
    # Round so that the smallest value in the reference has 6 significant digits.
    small = [abs(one) for one in reference.atoms(Number) if one]
    rounding = 6 + (_zeros(min(small)) if small and has_floats else 0)
    precision = 15 if has_floats else 50
    return verify(reference, stated, rounding, precision, allow_set_relation_comp=True, timeout_seconds=0)


def _zeros(value: Any) -> int:
    """Count the zeros after the decimal point of a positive number: 0 for 0.5, 1 for 0.05."""
    return max(0, -int(floor(N(log(value, 10), 15))) - 1) if value else 0
