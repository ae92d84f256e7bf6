"""Extract the final answer from a response. docs/math_reward.md has a table of the supported forms."""

import re

from nemo_rl_lite.rewards.numbers import numbers_in, plain

_THOUGHT, _THOUGHT_END = re.compile(r"<think(?:ing)?>"), re.compile(r"</think(?:ing)?>")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:\{|(?=\d))")
_ANSWER_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z]\w*>")
# Text between boxes or marked expressions of one list: "\boxed{3} and $x = $ \boxed{5}".
_BETWEEN = re.compile(
    r"X*(?:[,;]X*(?:and|or)?|(?:\\text\s*\{\s*)?(?:and|or)(?:\s*\})?|\\q?quad)X*(?:[A-Za-z]\w?\s*=)?X*".replace(
        "X", r"(?:[\s$]|\\q?quad|\\[()\[\], ])"
    )
)
_FARTHEST = 80
# Single dollars delimit math as in pandoc: no space after the first or before the second, no digit after the second.
# So amounts of money are not math.
_MARKED = re.compile(
    r"(?<!\\)\$\$(?P<display>.+?)\$\$|(?<![\\$])\$(?=\S)(?P<inline>(?:\\.|[^$\\])+)(?<=\S)\$(?!\d)"
    r"|\\\((?P<round>(?:(?!\\\().)+?)\\\)|\\\[(?P<square>(?:(?!\\\[).)+?)\\\]"
    r"|\*\*(?P<bold>(?:[^*\n]|(?<!\*)\*(?!\*))+?)\*\*|`(?P<code>[^`\n]+)`"
    r"|\\begin\{(?P<name>equation|align|gather)\*?\}(?P<lines>(?:(?!\\begin\{[eag]).)+?)\\end\{(?P=name)\*?\}",
    re.DOTALL,
)
_PHRASE = re.compile(
    # "#### Step 2" is a heading.
    r"####(?=\s*[-+$€\\(\[{.]*\d|\s*\S+\s*\Z)(?!\s*\d+[.)]\s)|\bans\.|(?:答案|答え)(?:是|为|為|は)?\s*[:：]?"
    r"|(?<!\bto )\b(?:answers?|ans|réponse|respuesta|antwort|risposta|resposta|ответ)\b"
    r"(?:(?:\s(?:to|for|of|in|we|that|should|must|will|would|then|here)\b[^.!?\n$\\\d:=]{0,40}?|\sfinale?)?"
    r"\s+(?:is|are|be|equals|est|es|ist|lautet|è|é)\b\s*:?|[\s*_\"']*[:：=—])"
    r"(?!\s*(?:not|found|obtained|calculated|computed|determined)\b)",
    re.IGNORECASE,
)
# Maximum words of an answer next to numbers, and characters of an answer before an explanation: "yes, because".
_LONG, _SHORT = 4, 5
# The response retracts an earlier statement.
_RETRACTION = re.compile(r"\b(?:wait|actually|hmm|correction|mistake)\b", re.IGNORECASE)
# A marked expression after these words is given, not an answer: "With $n=3$ there are 12".
_GIVEN = re.compile(
    r"\b(?:with|when|if|since|let|where|given|as|because|using|suppose|assuming|setting|for|from|take|put)\s*$",
    re.IGNORECASE,
)
# A number after these words belongs to the answer before it: "$12$ ways for 3 people".
_COMPLEMENT = re.compile(r"\b(?:for|per|with|in|from|at|on|by|step|case|part)\s*$", re.IGNORECASE)
_ENDING_NUMBER = re.compile(r"\d[\s%°)\]]*[.*_`]*\s*$")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
# Numbers and operators at the start of a statement: "12 for 3 people", "3, 5 and 7".
_LEADING = re.compile(r"[A-Za-z]?\s*=?\s*[-+(\[{.$]*\d(?:[\d\s.,:+\-*/^()\[\]{}=%!]|\band\b|\bor\b)*")
# Words before a number, and an addition after it: "exactly 12 (twelve), not 13".
_BEFORE_NUMBER = re.compile(
    r"^(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi|option|choice)\b)[a-z]{2,}(?: to| by)?:?\s+(?=[-+$(\[{.\d])"
)
_AFTER_ANSWER = re.compile(
    r"\s*\([^()\d]*[A-Za-z]{2}[^()\d]*\)$|,?\s+(?:not|because|since|as|which|but|rather|instead)\b.*"
)
_YES = re.compile(r"(?:yes|no|true|false)(?=[,.!;:]|$)", re.IGNORECASE)
# "D. None of them", and "(D) is correct".
_CHOICE = re.compile(r"\(?[A-Z][).:]\s*\S.*")
_CORRECT = re.compile(r"\b([A-Z])\)?\s+is\s+(?:the\s+)?(?:correct|right)\b")
_SOLUTIONS = re.compile(r"([A-Za-z])\s*=\s*\S+(?:(?:,|,?\s+or|,?\s+and)\s+\1\s*=\s*\S+)+$")
_CLOCK = re.compile(r"\d+(?:\s?:\s?\d+)+(?:\s?[ap]\.?m\b\.?)?", re.IGNORECASE)
# Two Latin letters, or one letter of a script that is not used for variables.
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi)\b)[A-Za-z]{2,}|[^\W\d_A-Za-zΑ-Ωα-ω]"
)
_GROUP = re.compile(r"[(\[{][^()\[\]{}]*,[^()\[\]{}]*[)\]}]$")
_BULLET = re.compile(r"^\s*(?:[-+*]|[^\w\s$\\(\[{|.√∞+-]+)\s+")
_SQUARED_UNIT = re.compile(r"(?<=\d)\s*\b[kcdm]?m(?:\^\{?[23]\}?|[23])$")
_BEFORE, _BEHIND = "*_`,;: ", "*_`,;:$\\ .\n"


def final_text(response: str) -> str | None:
    """Return the text after the reasoning (`</think>`); None if the reasoning is unfinished."""
    text = _THOUGHT_END.split(response)[-1]
    return None if _THOUGHT.search(text) else text


def find_answer(response: str) -> str:
    """Return the final answer without box, tags and marks; "" if there is none.

    The answer is searched after the reasoning, in this order:

    - the last box or `<answer>` tag; boxes in a list are one answer, and an unclosed box is empty;
    - the text after the last "answer is", "Answer:" or "####";
    - the last marked expression (`$...$`, `**...**`), or a plain number or expression after it.
    """
    text = final_text(response) or ""
    boxes, tags = _boxes(text), list(_ANSWER_TAG.finditer(text))
    if boxes and (not tags or boxes[-1][0] > tags[-1].start()):
        return _last_list(text, boxes)
    if tags:
        text = tags[-1][1]
    text = plain(_TAG.sub(" ", text)).strip()
    phrases = list(_PHRASE.finditer(text))
    if phrases and not _RETRACTION.search(text, phrases[-1].end()):
        rest = text[phrases[-1].end() :].lstrip("*_: \n\"'")
        stated = _first_stated(rest)
        if stated and (len(_WORD.findall(stated)) <= _LONG or not re.search(r"\d", rest)):
            return stated
    if tags:
        return _first_stated(text) if re.search(r"\d", text) else _unmarked(text)
    return _last_stated(text)


def unwrapped(reference: str) -> str:
    """Return a reference answer without box, marks, and the solution before it."""
    reference = reference.rpartition("####")[2]
    boxes = _boxes(reference)
    return _last_list(reference, boxes) if boxes else _unmarked(reference)


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Return start, end and content of each box; an unclosed box is empty."""
    boxes = []
    for opening in _BOX.finditer(text):
        depth, place = 1, opening.end()
        if not opening[0].endswith("{"):
            boxes.append((opening.start(), place + 1, text[place]))
            continue
        while place < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[place], 0) if text[place - 1] != "\\" else 0
            place += 1
        boxes.append((opening.start(), place, "" if depth else text[opening.end() : place - 1].strip()))
        if depth:
            break
    return boxes


def _last_list(text: str, boxes: list[tuple[int, int, str]]) -> str:
    """Return the last box, with the boxes before it in the same list."""
    listed = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _is_between(text, box[1], listed[0][0]):
            break
        listed.insert(0, box)
    return ", ".join(dict.fromkeys(content for *_, content in listed))


def _is_between(text: str, start: int, end: int) -> bool:
    return end - start < _FARTHEST and bool(_BETWEEN.fullmatch(text, start, end))


def _first_stated(text: str) -> str:
    """Return the answer at the start of a statement, or else the last number of its first sentence."""
    marked, end = _MARKED.search(text), _SENTENCE_END.search(text)
    if marked and not re.search(r"\d", text[: marked.start()]) and (not end or marked.start() <= end.start()):
        return _first_list(text, marked)
    sentence = (text[: end.start()] if end else text).replace("**", "").strip()
    sentence = re.sub(r"[\"'][\s}]*$", "", sentence)
    addition = _AFTER_ANSWER.search(sentence)
    if addition and (addition.start() <= _SHORT or re.search(r"\d", sentence[: addition.start()])):
        sentence = sentence[: addition.start()]
    sentence = _BEFORE_NUMBER.sub("", sentence)
    if len(_WORD.findall(sentence)) <= 1 or not re.search(r"\d", sentence):
        return sentence
    leading = _LEADING.match(sentence)
    if leading and _WORD.match(sentence, leading.end()):
        return re.sub(r"[\s,]*(?:\b(?:and|or))?[\s,]*$", "", leading[0])
    return _last_plain(sentence)


def _first_list(text: str, marked: re.Match[str]) -> str:
    """Return a marked expression, with the ones after it in the same list."""
    listed = [marked]
    while (found := _MARKED.search(text, listed[-1].end())) and _is_between(text, listed[-1].end(), found.start()):
        listed.append(found)
    return ", ".join(_unmarked(one[0]) for one in listed)


def _last_stated(text: str) -> str:
    """Return the last marked expression that is not given, or the plain expression after it."""
    marked = [one for one in _MARKED.finditer(text) if _is_expression(one)]
    stated = [one for one in marked if not _GIVEN.search(text, max(0, one.start() - 30), one.start())]
    after = text[stated[-1].end() :] if stated else text
    after = _MARKED.sub(lambda one: one[0].strip("*`") if one["bold"] or one["code"] else " ", after)
    numbers = list(numbers_in(after))
    if not stated:
        return _last_plain(after) if numbers or not marked else _unmarked(marked[-1][0])
    starts = [(one.string, max(0, one.start() - 30), one.start()) for one in numbers]
    if _ENDING_NUMBER.search(after) or not all(_COMPLEMENT.search(*start) for start in starts):
        return _last_plain(after)
    return _first_stated(stated[-1]["bold"]) if stated[-1]["bold"] else _unmarked(stated[-1][0])


def _is_expression(marked: re.Match[str]) -> bool:
    """Return False for emphasis within the text, as in a heading."""
    text = marked["bold"] or marked["code"]
    if not text or not marked.string[marked.end() :].strip(" .\n"):
        return True
    is_heading = re.match(r"\d+[.)]\s", text)
    return bool(re.match(r"[-$]?\d", text) and not is_heading) or not _WORD.search(text)


def _last_plain(text: str) -> str:
    """Return the expression at the end of an unmarked text, or else its last number or word."""
    lines = [line for line in text.split("\n") if line.strip(_BEHIND)]
    if not lines:
        return ""
    line = re.split(r"=>|⇒|→|∴", lines[-1])[-1]
    if _CHOICE.fullmatch(text):
        return text
    if (found := _YES.match(text) or _CORRECT.search(text)) and not re.search(r"\d", text):
        return found[found.re.groups]
    line = _BULLET.sub("", line).lstrip(_BEFORE).rstrip(_BEHIND)
    line = _SQUARED_UNIT.sub("", line)
    if not _WORD.search(line) and not ("=" in line and "," in line):
        return line
    line = re.sub(r"(?<=[\d%])\s+\([^()]*\)$", "", line)
    if found := _GROUP.search(line) or _SOLUTIONS.search(line):
        return found[0]
    # A line without numbers may follow the answer.
    numbers = list(numbers_in(line)) or list(numbers_in(text))
    if numbers and re.search(r"\d\s?:\s?$", numbers[-1].string[: numbers[-1].start()]):
        return _CLOCK.findall(numbers[-1].string)[-1]
    last = line.split()[-1].strip(_BEFORE)
    ends = bool(numbers) and numbers[-1].end() == len(numbers[-1].string.rstrip(_BEHIND))
    if re.fullmatch(r"\(?[^\W_]\)?", last) or (re.search(r"\d", last) and not _WORD.search(last)):
        return numbers[-1][0] if ends and len(numbers[-1][0]) > len(last) else last
    return numbers[-1][0] if numbers else last


def _unmarked(text: str) -> str:
    found = _MARKED.fullmatch(text.strip())
    if not found:
        return text.strip()
    names = ("display", "inline", "round", "square", "bold", "code", "lines")
    return next(found[name] for name in names if found[name]).strip()
