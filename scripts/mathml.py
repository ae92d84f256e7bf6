"""A Markdown extension writes formulas as MathML, which browsers render. It runs after pymdownx.arithmatex, which finds
the formulas."""

import html
import re

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor

FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)
# A function's name without a parenthesis between it and its argument.
FUNCTION = re.compile(r"(<mi>(?:log|exp)</mi>)(?!<mo|<mrow><mo)")


class FormulasAsMathML(Postprocessor):
    def run(self, text: str) -> str:
        return FORMULA.sub(self._mathml, text)

    @staticmethod
    def _mathml(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        mathml = convert(html.unescape(found[2]).strip(), display=display)
        return FUNCTION.sub(r'\1<mspace width="0.17em"/>', mathml)


class MathML(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # Run after other extensions have restored their stashed HTML (priority 30).
        md.postprocessors.register(FormulasAsMathML(md), "mathml", 5)


def makeExtension(**options: object) -> MathML:
    return MathML(**options)
