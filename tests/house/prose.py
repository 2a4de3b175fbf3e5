"""The sentences of docstrings, comments, messages and pages, without code."""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from textwrap import dedent
from typing import NamedTuple

from tests.house.source import Source

_FENCE = re.compile(r"^\s*(`{3,}|~{3,}|:::)")
# what begins a block of its own: an item of a list, an entry of Args or Raises
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
_ENTRY = re.compile(r"^\s+\*{0,2}[\w.,*`\[\] ]{1,50}(?:\([^)]*\))?:(\s|$)")
# a line that is no prose: heading, table, rule, directive, option of a directive, target, tag
_NO_PROSE = re.compile(r"^\s*(?:#|\||[=~^-]{3,}\s*$|\.\. |:\w+:|\([\w-]+\)=|<|\+[-=+]+$)")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)|\$\$?[^$]+\$\$?", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)", re.DOTALL)
# a colon ends a sentence too: what it announces is counted apart
_END = re.compile(r"""(?<=[.?!:])(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)(?<!vs\.)["')\]*_]*(?=\s)""")


class Sentence(NamedTuple):
    line: int
    text: str

    @property
    def num_words(self) -> int:
        return sum(bool(re.search(r"\w", word)) for word in self.text.split())


def split_sentences(text: str, line: int = 1) -> Iterator[Sentence]:
    """The sentences of a text that begins in `line`; code counts as one word."""
    first, _, rest = text.partition("\n")
    for start, raw in _blocks([first.lstrip(), *dedent(rest).split("\n")]):
        block = _CODE.sub(lambda m: "X" + "\n" * m[0].count("\n"), raw)
        block = _LINK.sub(lambda m: m[1] + "\n" * m[0][m.end(1) - m.start() :].count("\n"), block)
        at = 0
        for end in [*(m.end() for m in _END.finditer(block)), len(block)]:
            sentence = block[at:end]
            if sentence.strip():
                blank = len(sentence) - len(sentence.lstrip())
                yield Sentence(
                    line + start + block[: at + blank].count("\n"), " ".join(sentence.split())
                )
            at = end


def _blocks(lines: list[str]) -> Iterator[tuple[int, str]]:
    """First line and text of each paragraph, item or entry."""
    block: list[str] = []
    start = 0
    for index, line in _prose_lines(lines):
        begins = not line or _ITEM.match(line) or _ENTRY.match(line)
        if begins and block:
            yield start, "\n".join(block)
            block = []
        if line:
            start = start if block else index
            block.append(_ITEM.sub("", line))
    if block:
        yield start, "\n".join(block)


def _prose_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is prose; an empty text for one that is not."""
    fence = ""
    # the least indent of the literal block that we are in; the indent of the last line of prose
    literal, last = None, 0
    doctest, blank = False, True
    for index, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        opened = _FENCE.match(line)
        prose = False
        if fence:
            fence = "" if opened and opened[1].startswith(fence) else fence
        elif opened:
            fence = opened[1]
        elif not line.strip():
            doctest, blank = False, True
        elif literal is not None and indent >= literal:
            pass
        elif doctest or line.lstrip().startswith(">>>"):
            doctest = True
        elif blank and indent >= 4 and not last:
            literal = indent
        elif not _NO_PROSE.match(line):
            literal = indent + 1 if line.rstrip().endswith("::") else None
            prose, blank, last = True, False, indent
        yield index, line if prose else ""


def all_docstrings(source: Source) -> Iterator[ast.Constant]:
    """Those of modules, classes and functions, and of fields, constants and attributes."""
    yield from (node for _, node in source.docstrings())
    yield from source.attribute_docstrings()


def docstring_sentences(source: Source) -> Iterator[Sentence]:
    for node in all_docstrings(source):
        yield from split_sentences(node.value, node.lineno)


def comment_sentences(source: Source) -> Iterator[Sentence]:
    """Comments on adjacent lines are read together."""
    for _, group in groupby(enumerate(sorted(source.comments)), lambda item: item[1] - item[0]):
        lines = [line for _, line in group]
        yield from split_sentences("\n".join(source.comments[i] for i in lines), lines[0])


def message_sentences(source: Source) -> Iterator[Sentence]:
    """What is given to errors and warnings; an inserted value counts as one word."""
    for node in source.find(ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "warn" or name.endswith(("Error", "Warning")):
            for argument in node.args:
                for text in _literal_texts(argument):
                    yield from (Sentence(node.lineno, s.text) for s in split_sentences(text))


def _literal_texts(node: ast.expr) -> list[str]:
    """The texts that an expression may be; of one that is not spelled out, none."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(v.value if isinstance(v, ast.Constant) else "X" for v in values)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return ["".join((_literal_texts(part) or ["X"])[0] for part in (left, right))]
        case ast.IfExp(body=body, orelse=orelse):
            return _literal_texts(body) + _literal_texts(orelse)
    return []
