"""Texts of the command line that were meant to have a newline."""

import re

NEWLINE = 'in bash, $\'key="one\\ntwo"\' has a newline at \\n; a YAML file has one in "one\\ntwo"'
"""How a value gets a newline."""
# LaTeX has commands that begin with an n.
_WRITTEN_NEWLINE = re.compile(
    r"\\n(?!(?:e|eq|eg|u|i|abla|ot|otin|leq|geq|mid|subset\w*|ewline|atural|earrow|orm)(?![a-z]))"
)


def has_written_newline(text: str | None) -> bool:
    """Whether a text has a backslash and an n where it was likely meant to have a newline."""
    return text is not None and _WRITTEN_NEWLINE.search(text) is not None
