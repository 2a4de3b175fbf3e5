"""Sentences are short, have a subject, and use the words of the field."""

import re
from collections.abc import Iterable, Iterator

import pytest

from tests.house.prose import (
    Sentence,
    all_docstrings,
    comment_sentences,
    docstring_sentences,
    message_sentences,
    split_sentences,
)
from tests.house.source import ROOT, Source, Violation, plant, read_package, refuse

WORDS_OF_A_SENTENCE = 25
# a docstring that opens so has no subject
OPENING = re.compile(r"(What|Which|That of|Those of|The same|All that|As many|See)\b")
# phrases that stand for a word of the field: that word
PHRASES = {
    r"hand(s|ed|ing)?( \w+)? on(?! which| what)": "return, pass",
    r"comput(e|es|ed|ing)( \w+)? again": "recompute",
    r"(write|writes|wrote|written|writing)( \w+)? down": "trace, record",
    r"(take|takes|took|taken|taking)( \w+)? apart": "flatten, shard",
    r"(put|puts|putting)( \w+)? together": "unflatten, gather",
    r"(let|lets|letting)( \w+)? go": "free",
    r"(work|works|worked|working)( it| them)? out": "compute, derive",
    r"at hand": "current",
    r"(is|are|was|were) to be": "must be, or a verb with its subject",
    # the column `held` of reports keeps its name: where it is defined, a colon follows
    r"held(?! ?:)": "saved, residual, alive",
    r"kept": "saved",
    r"told": "warned, recorded, distinguished",
    r"asked": "guard, request",
}
_ANY = re.compile(rf"\b({'|'.join(PHRASES)})\b", re.IGNORECASE)
# errors that users and tests of JAX know word for word
WORDED_BY_JAX = ("Custom VJP fwd rule X for function X must produce a pair",)
PAGES = ["README.md", "CONTRIBUTING.md", "docs/**/*.md"]


def find_openings(source: Source) -> Iterator[Violation]:
    for node in all_docstrings(source):
        if OPENING.match(node.value.strip()):
            yield source.violation(node, f"opens with {' '.join(node.value.split()[:6])!r}")


def find_long(path: str, sentences: Iterable[Sentence]) -> Iterator[Violation]:
    for sentence in sentences:
        words = sentence.num_words
        if words > WORDS_OF_A_SENTENCE and not sentence.text.startswith(WORDED_BY_JAX):
            yield Violation(path, sentence.line, f"{words} words: {sentence.text}")


def find_phrases(path: str, sentences: Iterable[Sentence]) -> Iterator[Violation]:
    for sentence in sentences:
        for found in _ANY.finditer(sentence.text):
            word = next(w for phrase, w in PHRASES.items() if re.fullmatch(phrase, found[0], re.I))
            yield Violation(path, sentence.line, f"{found[0]!r} ({word}): {sentence.text}")


def read_pages() -> Iterator[tuple[str, list[Sentence]]]:
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        if "_build" not in path.parts:
            text = path.read_text("utf-8")
            yield path.relative_to(ROOT).as_posix(), list(split_sentences(text))


def violations() -> Iterator[Violation]:
    for source in read_package():
        sentences = [*docstring_sentences(source), *message_sentences(source)]
        yield from find_openings(source)
        yield from find_long(source.path, sentences)
        yield from find_phrases(source.path, [*sentences, *comment_sentences(source)])
    for path, sentences in read_pages():
        yield from find_long(path, sentences)
        yield from find_phrases(path, sentences)


def test_prose():
    refuse(violations())


LONG = "one two three four five " * 5 + "six"


@pytest.mark.parametrize(
    ("text", "num_words"),
    [
        (f"{LONG}.", [26]),
        ("One two. Three\nfour? Five: six seven, e.g. eight.", [2, 2, 1, 4]),
        ("One `a b\nc` two ``d e`` [three four](x.md) $x + y$.", [7]),
        ("One.\n\n    >>> f(a, b)\n    3 and more\n\nTwo three.", [1, 2]),
        ("One two::\n\n    code of some words\n    more\n\nThree.", [2, 1]),
        ("Args:\n    name: One two.\n    other (int): three\n        four.", [1, 1, 2, 2, 2]),
        ("- one two\n- three\n  four five\n1. six", [2, 3, 1]),
        ("```\ncode of words\n```\n| a | b |\n# Heading\nOne.", [1]),
    ],
)
def test_sentences_are_split(text, num_words):
    assert [s.num_words for s in split_sentences(text)] == num_words


def test_indented_code_is_no_prose():
    text = "One:\n\n    code of words\n\n    more of it\n\nTwo three."
    assert [(s.line, s.num_words) for s in split_sentences(text)] == [(1, 1), (7, 2)]


def test_lines_of_sentences():
    found = split_sentences("One\n`two\nthree` four. Five\n\nsix", line=10)
    assert [s.line for s in found] == [10, 12, 14]


def test_long_sentences_are_found():
    source = plant(f'raise TraceError(f"{{x}} is " + "{LONG}")\ndef f(): "{LONG}"')
    found = [*docstring_sentences(source), *message_sentences(source)]
    assert [v.text[:8] for v in find_long(source.path, found)] == ["26 words", "28 words"]


@pytest.mark.parametrize("text", ["What it is.", "That of f.", "See `f`.", "The same for g."])
def test_openings_are_found(text):
    assert len(list(find_openings(plant(f"'''{text}'''")))) == 1
    assert list(find_openings(plant(f"'''A note. {text}'''"))) == []


@pytest.mark.parametrize("where", ["", "class A:\n    ", "def f(self):\n    self."])
def test_what_stands_below_an_attribute_is_read(where):
    indent = "    " if where else ""
    text = f"What it is. {LONG}, which was handed on."
    source = plant(f'{where}x: int = 1\n{indent}"""{text}"""')
    assert len(list(find_openings(source))) == 1
    sentences = list(docstring_sentences(source))
    assert len(list(find_long(source.path, sentences))) == 1
    assert len(list(find_phrases(source.path, sentences))) == 1


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("It is handed on to f.", "handed on"),
        ("f hands it on.", "hands it on"),
        ("Computed again\nlater.", "Computed again"),
        ("It is to be freed.", "is to be"),
        ("`is to be` is code, a hand on which we count", None),
    ],
)
def test_phrases_are_found(text, phrase):
    source = plant("\n".join(f"# {line}" for line in text.splitlines()))
    found = [v.text for v in find_phrases(source.path, comment_sentences(source))]
    assert [text.split("'")[1] for text in found] == ([phrase] if phrase else [])
