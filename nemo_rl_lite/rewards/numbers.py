"""Read written numbers: signs, thousands separators, fractions, powers of ten, percentages."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

# Typographic minus signs, dashes and spaces, and full-width characters, as ASCII.
_SIGNS = (
    dict.fromkeys(map(ord, "\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{NON-BREAKING HYPHEN}"), "-")
    | dict.fromkeys(map(ord, "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}\N{IDEOGRAPHIC SPACE}"), " ")
    | {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | {ord("\N{IDEOGRAPHIC FULL STOP}"): ".", ord("\N{IDEOGRAPHIC COMMA}"): ","}
)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
# Python's power, as in x**2; other double stars are bold text.
_POWER_STARS = re.compile(r"(?<=[A-Za-z\d)])\*\*(?=[\d(]|-\d)")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")

_REPEATING = re.compile(r"(-?)(\d{1,20}\.\d{0,20})\\(?:overline|bar|dot)\s*\{?\s*(\d{1,20})\s*\}?")

# Digits in exponents, indices, units (m2) and after a decimal point do not start a number.
_START = r"(?<![\d^_/m])(?<!\d\.)(?<![\^_]\{)(?<![\^_]-)(?<![\^_]\{-)"
_GROUPED = r"\d{1,3}(?:(?:,\d{3})+|(?:'\d{3})+|(?:_\d{3})+|(?: \d{3})+(?!\s?/))(?!\d)"
_DIGITS = rf"{_START}(?:{_GROUPED}|\d+)(?:\.\d+)?|(?<![\w.])\.\d+"
_POWER = r"\s?(?:\^|\*\*)\s?(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))"
_TEN = rf"\s?(?:\*|×|·|\\times|\\cdot|x)\s?10{_POWER}"
NUMBER = re.compile(
    # A minus after a digit, a letter or a bracket is a subtraction, not a sign.
    rf"(?P<sign>(?:(?<![\w)\]}}.!])[-+])?)(?:\\?\$\s?|[€£¥₹]\s?)?(?P<inner>(?<=[$€£¥₹])-|)"
    rf"(?:(?P<whole>\d+) (?=\d+/\d))?(?P<digits>{_DIGITS})"
    rf"(?:[eE](?P<exponent>[-+]?\d+)(?!\w)|(?P<ten>{_TEN})|(?P<power>{_POWER})"
    r"|\s?/\s?(?P<under>\d+(?:\.\d+)?)(?![\d/]))?(?P<percent>\s?\\?%|\s(?:percent|per cent)\b)?"
    r"(?P<scale>\s(?:thousand|million|billion|trillion)\b)?"
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Larger powers take minutes, and Python refuses longer digit strings.
_LARGEST_POWER, _LONGEST_BASE, _LONGEST = 4000, 20, 4000
# Digits that a rounded number must have.
_ROUNDED = 6


@dataclass(frozen=True)
class WrittenNumber:
    """A number. `decimals` counts the written ones, None for integers and fractions; a percentage is not divided."""

    value: Fraction
    decimals: int | None = None
    is_percentage: bool = False

    def equals(self, other: "WrittenNumber") -> bool:
        """Compare the values. 50 % equals both 0.5 and 50, because answers often omit the sign."""
        if self.is_percentage == other.is_percentage:
            return self._same(other)
        part, whole = (self, other) if self.is_percentage else (other, self)
        decimals = None if part.decimals is None else part.decimals + 2
        return part._same(whole) or replace(part, value=part.value / 100, decimals=decimals)._same(whole)

    def _same(self, other: "WrittenNumber") -> bool:
        if self.value == other.value:
            return True
        if self.decimals is None and other.decimals is None:
            return False
        # Rounding error of float64.
        if abs(self.value - other.value) <= abs(other.value) / 10**14:
            return True
        first, second = sorted((self, other), key=lambda one: float("inf") if one.decimals is None else one.decimals)
        return first._rounds(second.value)

    def _rounds(self, exact: Fraction) -> bool:
        """Return True if this is `exact`, rounded or truncated to 6 or more decimals and 6 significant digits."""
        digits = self.decimals or 0
        unit = Fraction(1, 10**digits) if digits >= _ROUNDED else Fraction(0)
        enough = abs(self.value) >= min(Fraction(1), unit * 10 ** (_ROUNDED - 1))
        is_cut_off = self.value * exact > 0 and abs(self.value) <= abs(exact) < abs(self.value) + unit
        return enough and (is_cut_off or abs(self.value - exact) <= unit / 2)


def plain(text: str) -> str:
    """Replace typographic characters by ASCII: ½ becomes 1/2, 10⁵ becomes 10^{5}, x**2 becomes x^2."""
    text = _POWER_STARS.sub("^", text)
    text = _VULGAR.sub(lambda one: " " + unicodedata.normalize("NFKC", one[0]).replace("\N{FRACTION SLASH}", "/"), text)
    text = _SUPERSCRIPTS.sub(lambda one: f"^{{{unicodedata.normalize('NFKC', one[0])}}}", text)
    return text.translate(_SIGNS)


def read_number(text: str) -> WrittenNumber | None:
    """Read a text that is a single number; None for other texts."""
    text = re.sub(r"^([-+]) ", r"\1", _with_fractions(text).strip())
    if repeating := _REPEATING.fullmatch(text):
        sign, first, last = repeating.groups()
        value = Fraction(first) + Fraction(int(last), (10 ** len(last) - 1) * 10 ** len(first.partition(".")[2]))
        return WrittenNumber(-value if sign else value)
    found = NUMBER.fullmatch(text)
    return _value(found) if found else None


def last_number_in(text: str) -> WrittenNumber | None:
    """Read the last number in a text; None if there is none, or if it is too large."""
    found = list(numbers_in(text))
    return _value(found[-1]) if found else None


def numbers_in(text: str) -> Iterator[re.Match[str]]:
    """Find the numbers in a text, in order, after `plain` and with fractions written as 3/4."""
    return NUMBER.finditer(_with_fractions(text))


def _with_fractions(text: str) -> str:
    def written(found: re.Match[str]) -> str:
        over, under = (next(filter(None, pair)) for pair in (found.groups()[:2], found.groups()[2:]))
        is_mixed = found.string[max(0, found.start() - 1) : found.start()].isdigit()
        return f"{' ' if is_mixed else ''}{over}/{under}"

    return _FRACTION.sub(written, plain(text))


def _value(found: re.Match[str]) -> WrittenNumber | None:
    if found.end() - found.start() > _LONGEST:
        return None
    digits, own = re.sub("[,' _]", "", found["digits"]), found["power"]
    last = re.search(r"[-+]?\d+(?=\D*$)", found["exponent"] or found["ten"] or own or "")
    value, power = Fraction(digits), int(last[0]) if last else 0
    if abs(power) > _LARGEST_POWER or (own and len(digits) > _LONGEST_BASE):
        return None
    try:
        value = value**power if own else value * Fraction(10) ** power / Fraction(found["under"] or 1)
    except ZeroDivisionError:
        return None
    value = (value + int(found["whole"] or 0)) * _SCALES.get((found["scale"] or "").strip(), 1)
    decimals = len(digits.partition(".")[2]) - power
    is_decimal = "." in digits and decimals > 0 and not own and not found["under"] and not found["scale"]
    sign = -1 if "-" in (found["sign"], found["inner"]) else 1
    return WrittenNumber(sign * value, decimals if is_decimal else None, bool(found["percent"]))
