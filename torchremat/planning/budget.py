"""Budgets as users write them: bytes, a fraction of the peak, the least memory, or added time."""

import re
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torchremat.errors import BudgetSpellingError, BudgetTypeError, nearest_names

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# "8GB" is 8 GiB, as device memory is counted: a device "of 80 GB" has 80 GiB
_UNITS = {
    unit.casefold(): 1024**power
    for letter, power in _POWERS.items()
    for unit in ((f"{letter}iB", f"{letter}B", letter) if letter else ("B",))
}
_SHOWN_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

BudgetLike = int | float | str
"""Bytes, a fraction of the peak without rematerialisation, or a spelling: `Budget.of` reads it."""

_FORMS = (
    "bytes ('2GiB', '500MiB'; an int), a fraction of the peak without rematerialisation ('50%'; a "
    "float in (0, 1]), 'least' memory, or the least memory for some more time ('time:+10%')"
)


@dataclass(frozen=True)
class Budget:
    """A budget of peak memory, written in one of four ways.

    Attributes:
        nbytes: bytes.
        fraction: a part of the peak without rematerialisation.
        is_least: whether it is the least memory that a step can do with.
        added: it is the least memory with which a step takes at most so much more time, as a part
            of the time without rematerialisation.
    """

    nbytes: int | None = None
    fraction: float | None = None
    is_least: bool = False
    added: float | None = None

    @classmethod
    def of(cls, given: "BudgetLike | Budget") -> "Budget":
        """The budget that `given` means.

        Units are of 1024, in any case: `8GiB`, `8GB` and `8g` are the same. Raises
        `BudgetTypeError` (a `TypeError`) for anything but a number or text. Raises
        `BudgetSpellingError` (a `ValueError`) for text that cannot be read, a budget that is not
        positive, and a fraction above 1.

        >>> Budget.of("2GiB").nbytes, Budget.of("1.5 mb").nbytes, Budget.of(4096).nbytes
        (2147483648, 1572864, 4096)
        >>> Budget.of(0.5).fraction, Budget.of("50%").fraction
        (0.5, 0.5)
        >>> Budget.of("least").is_least, Budget.of("time:+10%").added
        (True, 0.1)
        """
        if isinstance(given, Budget):
            return given
        if isinstance(given, str):
            return _read(given)
        given = plain_number(given)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise BudgetTypeError(
                f"{given!r} ({type(given).__name__}) is not a budget: a budget is {_FORMS}"
            )
        if isinstance(given, int):
            if given <= 0:
                raise BudgetSpellingError(
                    f"a budget is a positive number of bytes, but it is {given}"
                )
            return cls(nbytes=given)
        return cls(fraction=_fraction(given, given))

    @property
    def is_relative(self) -> bool:
        """Whether its bytes depend on the step that it is for."""
        return self.nbytes is None

    @property
    def is_searched(self) -> bool:
        """Whether a search for schedules finds its bytes: of the least memory, for some time."""
        return self.is_least or self.added is not None

    def bytes_of(self, plain_peak: int) -> int:
        """The bytes, where they are given or a fraction of `plain_peak`."""
        if self.nbytes is not None:
            return self.nbytes
        assert self.fraction is not None, "a planner finds the bytes of other budgets"
        return int(self.fraction * plain_peak)


def plain_number(given: Any) -> Any:
    """A number of another library's, NumPy's say, as Python's; anything else as it is.

    >>> import numpy
    >>> plain_number(numpy.int64(4096)), plain_number(numpy.float32(0.5)), plain_number("2GiB")
    (4096, 0.5, '2GiB')
    """
    if isinstance(given, bool | int | float):
        return given
    if isinstance(given, Integral):
        return int(given)
    return float(given) if isinstance(given, Real) else given


def bytes_of_limit(given: int | str, option: str = "saved") -> int:
    """The bytes that an option is given as, which may be 0, and are no fraction.

    Raises `BudgetTypeError` (a `TypeError`) and `BudgetSpellingError` (a `ValueError`).

    >>> bytes_of_limit("2KiB"), bytes_of_limit(0), bytes_of_limit("0B")
    (2048, 0, 0)
    """
    if given in (0, "0B") and not isinstance(given, bool | float):
        return 0
    nbytes = Budget.of(given).nbytes
    if nbytes is None:
        raise BudgetTypeError(
            f"{option}={given!r} is not a number of bytes: give bytes ('200MiB', an int), or a "
            "budget of peak memory, memory_budget('50%')"
        )
    return nbytes


_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*|%)")
_TIME = re.compile(r"time\s*:\s*(.*)", re.IGNORECASE)


def _read(text: str) -> Budget:
    given = text.strip()
    if given.casefold() == "least":
        return Budget(is_least=True)
    if (time := _TIME.fullmatch(given)) is not None:
        return Budget(added=_read_added(time[1], text))
    match = _QUANTITY.fullmatch(given)
    if match is None:
        word = given.partition(":")[0].strip()
        near = f"it is not a number with a unit; {nearest_names(word, ('least', 'time'))}"
        raise _unreadable_error(text, near if word.isalpha() else "it is not a number with a unit")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        return Budget(fraction=_fraction(number / 100, text))
    if not unit:
        if "." in match[1]:
            return Budget(fraction=_fraction(number, text))
        raise _unreadable_error(
            text,
            f"it has no unit: write '{match[1]}GiB', or '{match[1]}B' if bytes are meant",
        )
    if unit.casefold() not in _UNITS:
        raise _unreadable_error(
            text, f"{unit!r} is not a unit, {nearest_names(unit, _SHOWN_UNITS)}"
        )
    nbytes = int(number * _UNITS[unit.casefold()])
    if nbytes <= 0:
        raise _unreadable_error(text, "a budget is positive")
    return Budget(nbytes=nbytes)


def _read_added(text: str, whole: str) -> float:
    """The part of the time that may be added, in `+10%`."""
    match = re.fullmatch(r"([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)", text.strip())
    if match is None:
        raise _unreadable_error(whole, "after 'time:' comes how much more, as in 'time:+10%'")
    if match[1] == "-":
        raise _unreadable_error(
            whole, "no recomputation takes less time than none: write 'time:+0%' for no more"
        )
    if not match[1] or not match[3]:
        raise _unreadable_error(whole, f"write 'time:+{match[2]}%' for {match[2]} % more time")
    return float(match[2]) / 100


def _fraction(value: float, given: object) -> float:
    if not 0 < value <= 1:  # nan is neither
        raise BudgetSpellingError(
            f"a fraction of the peak without rematerialisation is in (0, 1], but it is {given!r}. "
            "For bytes give an int, or text such as '2GiB'"
        )
    return value


def _unreadable_error(text: str, why: str) -> BudgetSpellingError:
    return BudgetSpellingError(f"{text!r} is not a budget: {why}. A budget is {_FORMS}")
