"""Policies as text, for configuration files: `"dots|names:attn,mlp"`.

    spelling = term, { "|", term } ;
    term     = word | word, ":", item, { ",", item } ;

A word stands for what makes the policy. Each is registered by the module that has the policy, since
some of them (budgets, plans) belong to layers above this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchremat.errors import PolicyError, PolicyValueError, nearest_names

if TYPE_CHECKING:
    from torchremat.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the language: what makes its policy, and an example of the items it takes."""

    make: "Callable[..., Policy]"
    items: str = ""


_words: dict[str, Word] = {}
_functions: dict[str, str] = {}
"""The words of functions of `checkpoint_policies`, whose own names are read as well."""


def register_word(
    word: str, make: "Callable[..., Policy]", items: str = "", *, function: str = ""
) -> None:
    """Let `word` stand for `make()`, or, where `items` shows an example, for `make(*items)`.

    The name of a `function` that has a shorter word is read too.
    """
    _words[word] = Word(make, items)
    if function:
        _functions[function] = word


def known_spellings() -> list[str]:
    """All words, each with an example of the items it takes."""
    return [f"{word}:{entry.items}" if entry.items else word for word, entry in _words.items()]


def is_policy_maker(function: object) -> bool:
    """Whether `function` makes a policy when called with items, and so is not one itself."""
    return any(entry.items and entry.make == function for entry in _words.values())


def spell(word: str, items: Sequence[str]) -> str | None:
    """The term that reads as `word` with `items`; `None` if there is no such term."""
    if any(item != item.strip() or not item or set(",|") & set(item) for item in items):
        return None
    return f"{word}:{','.join(items)}"


def parse_spelling(text: str) -> "list[Policy]":
    """The policies that the terms of `text` stand for.

    Raises `PolicyError` (a `TypeError`) if `text` is no string, and `PolicyValueError` (a
    `ValueError`) if it is not in the language.
    """
    if not isinstance(text, str):
        raise PolicyError(
            f"policy({text!r}) reads the spelling of a policy, a str, and was given a "
            f"{type(text).__name__}. What is a policy already needs no reading"
        )
    return [_parse_term(term.strip(), text) for term in text.split("|")]


def _parse_term(term: str, text: str) -> "Policy":
    word, colon, listed = (part.strip() for part in term.partition(":"))
    entry = _words.get(_functions.get(word, word))
    if entry is None:
        raise _unknown_word(word, text)
    if not colon:
        if entry.items:
            raise _invalid(text, f"{word!r} takes a list, as in '{word}:{entry.items}'")
        return entry.make()
    if not entry.items:
        raise _invalid(text, f"{word!r} takes no list: write {word!r} alone")
    items = [item.strip() for item in listed.split(",")]
    if not all(items):
        raise _invalid(text, f"the list of {word!r} has an empty item: write '{word}:a,b'")
    return entry.make(*items)


def _unknown_word(word: str, text: str) -> Exception:
    what = f"{word!r} is no policy, {nearest_names(word, _words)}" if word else "a term is empty"
    return _invalid(text, what)


def _invalid(text: str, what: str) -> PolicyValueError:
    return PolicyValueError(
        f"policy({text!r}): {what}. Spellings are {', '.join(known_spellings())}, joined with |"
    )
