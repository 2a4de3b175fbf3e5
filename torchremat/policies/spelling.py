"""Policies as text, for configuration files: `"dots|names:attn,mlp"`.

    spelling = term, { "|", term } ;
    term     = word | word, ":", item, { ",", item } ;

A word stands for a function that makes the policy. The module that defines the policy registers it,
since budgets and plans belong to layers above this one. This file knows no class of policies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    return [f"{word}:{entry.items}" if entry.items else word for word, entry in _entries.items()]


def is_policy_maker(function: object) -> bool:
    return any(entry.items and entry.make == function for entry in _entries.values())


def spell(word: str, items: Sequence[str]) -> str | None:
    if any(item != item.strip() or not item or set(",|") & set(item) for item in items):
        return None
    return f"{word}:{','.join(items)}"


def parse_spelling(text: str) -> list[Any]:
    """The policies that the terms of `text` stand for.

    Raises `PolicyError` (a `TypeError`) if `text` is no string, and `PolicyValueError` (a
    `ValueError`) if it is not in the language.
    """
    if not isinstance(text, str):
        raise PolicyError(
            f"policy({text!r}) reads the spelling of a policy, a str, and was given a "
            f"{type(text).__name__}. Pass a policy as it is"
        )
    return [_parse_term(term.strip(), text) for term in text.split("|")]


def _parse_term(term: str, text: str) -> Any:
    word, colon, item_text = (part.strip() for part in term.partition(":"))
    entry = _entries.get(_word_of_function.get(word, word))
    if entry is None:
        unknown = f"{word!r} is no policy, {nearest_names(word, _entries)}"
        raise _make_error(text, unknown if word else "a term is empty")
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


def _make_error(text: str, problem: str) -> PolicyValueError:
    return PolicyValueError(
        f"policy({text!r}): {problem}. Spellings are {', '.join(list_spellings())}, joined with |"
    )
