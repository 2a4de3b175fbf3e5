"""Policies as text, for configuration files: `"dots|names:attn,mlp"`.

    spelling = both, { "|", both } ;
    both     = one, { "&", one } ;
    one      = "~", one | "(", spelling, ")" | term ;
    term     = word | word, ":", item, { ",", item } ;

A word stands for a function that makes the policy. The module that defines the policy registers it,
since budgets and plans belong to layers above this one. This file knows no class of policies.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchremat.core.upper_rooms import load_rooms
from torchremat.errors import PolicyError, PolicyValueError, nearest_names


@dataclass(frozen=True, slots=True)
class SpellingEntry:
    make: Callable[..., Any]
    items: str = ""


_entries: dict[str, SpellingEntry] = {}
_word_of_function: dict[str, str] = {}
"""The words of functions of `checkpoint_policies`, whose own names are read as well."""


def register_spelling(
    word: str, make: Callable[..., Any], items: str = "", *, function: str = ""
) -> None:
    """Let `word` stand for `make()`, or, where `items` shows an example, for `make(*items)`.

    The name of a `function` that has a shorter word is read too.
    """
    _entries[word] = SpellingEntry(make, items)
    if function:
        _word_of_function[function] = word


def list_spellings() -> list[str]:
    load_rooms("policies")
    return [f"{word}:{entry.items}" if entry.items else word for word, entry in _entries.items()]


def is_policy_maker(function: object) -> bool:
    return any(entry.items and entry.make == function for entry in _entries.values())


def spell(word: str, items: Sequence[str]) -> str | None:
    if any(item != item.strip() or not item or set(",|&()") & set(item) for item in items):
        return None
    return f"{word}:{','.join(items)}"


def parse_spelling(text: str) -> Any:
    """The policy that `text` stands for.

    Raises `PolicyError` (a `TypeError`) if `text` is not a string, and `PolicyValueError` (a
    `ValueError`) if it is not in the language.
    """
    if not isinstance(text, str):
        raise PolicyError(
            f"policy({text!r}) reads the spelling of a policy, a str, and was given a "
            f"{type(text).__name__}. Pass a policy as it is"
        )
    return _Reader(text).read()


class _Reader:
    """Reads a spelling from left to right; a method for each rule of the language."""

    def __init__(self, text: str) -> None:
        self.text = self.rest = text
        self.depth = 0

    def read(self) -> Any:
        found = self._read_spelling()
        if self.rest:
            raise _make_error(self.text, f"{self.rest.strip()!r} follows a ')' without | or &")
        return found

    def _read_spelling(self) -> Any:
        found = self._read_both()
        while self._take("|"):
            found = found | self._read_both()
        return found

    def _read_both(self) -> Any:
        found = self._read_one()
        while self._take("&"):
            found = found & self._read_one()
        return found

    def _read_one(self) -> Any:
        if self._take("~"):
            return ~self._read_one()
        if self._take("("):
            self.depth += 1
            found = self._read_spelling()
            self.depth -= 1
            if not self._take(")"):
                raise _make_error(self.text, "a '(' has no ')'")
            self.rest = self.rest.lstrip()
            return found
        term = re.match(r"[^|&)]*" if self.depth else r"[^|&]*", self.rest)
        assert term is not None
        self.rest = self.rest[term.end() :]
        return _parse_term(term[0].strip(), self.text)

    def _take(self, sign: str) -> bool:
        rest = self.rest.lstrip()
        if rest.startswith(sign):
            self.rest = rest[1:]
        return rest.startswith(sign)


def _parse_term(term: str, text: str) -> Any:
    word, colon, item_text = (part.strip() for part in term.partition(":"))
    entry = _find_entry(word)
    if entry is None:
        raise _make_error(text, _describe_unknown(term, word) if word else "a term is empty")
    if not colon:
        if entry.items:
            raise _make_error(text, f"{word!r} takes a list, as in '{word}:{entry.items}'")
        return entry.make()
    if not entry.items:
        raise _make_error(text, f"{word!r} takes no list: write {word!r} alone")
    items = [item.strip() for item in item_text.split(",")]
    if not all(items):
        raise _make_error(text, f"the list of {word!r} has an empty item: write '{word}:a,b'")
    return entry.make(*items)


def _find_entry(word: str) -> SpellingEntry | None:
    if _word_of_function.get(word, word) not in _entries:
        load_rooms("policies")
    return _entries.get(_word_of_function.get(word, word))


def _describe_unknown(term: str, word: str) -> str:
    if re.fullmatch(r"\d*\.?\d+ *(%|[A-Za-z]*)", term):
        return f"unknown policy {term!r}; a budget of peak memory is written 'budget:{term}'"
    return f"unknown policy {word!r}, {nearest_names(word, _entries)}"


def _make_error(text: str, problem: str) -> PolicyValueError:
    return PolicyValueError(
        f"policy({text!r}): {problem}. Spellings are {', '.join(list_spellings())}, joined with "
        "| or &, reversed with ~"
    )
