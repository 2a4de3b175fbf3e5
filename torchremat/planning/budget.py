"""Budgets as users write them: bytes, text such as "2GiB", or a fraction of the peak."""

import re
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torchremat.errors import BudgetSpellingError, BudgetTypeError, nearest_names

_UNITS = {
    "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip

BudgetLike = int | float | str
"""Bytes, a fraction of the peak without rematerialisation, or the spelling of either."""


@dataclass(frozen=True)
class Budget:
    """A budget of peak memory; one of `nbytes` and `fraction` is given."""

    nbytes: int | None = None
    fraction: float | None = None

    @classmethod
    def of(cls, given: "BudgetLike | Budget") -> "Budget":
        """The budget that `given` means.

        Raises `BudgetTypeError` (a `TypeError`) for anything but a number or text. Raises
        `BudgetSpellingError` (a `ValueError`) for text that cannot be read, a budget that is not
        positive, and a fraction above 1.

        >>> Budget.of("2GiB").nbytes, Budget.of("1.5 MB").nbytes, Budget.of(4096).nbytes
        (2147483648, 1500000, 4096)
        >>> Budget.of(0.5).fraction, Budget.of("50%").fraction
        (0.5, 0.5)
        """
        if isinstance(given, Budget):
            return given
        if isinstance(given, str):
            return _read(given)
        given = plain_number(given)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise BudgetTypeError(
                f"{given!r} ({type(given).__name__}) is no budget: a budget is bytes (an int, or "
                "text such as '2GiB') or a fraction of the peak without rematerialisation (a float "
                "in (0, 1])"
            )
        if isinstance(given, int):
            if given <= 0:
                raise BudgetSpellingError(
                    f"a budget is a positive number of bytes, but it is {given}"
                )
            return cls(nbytes=given)
        return cls(fraction=_fraction(given, given))

    def bytes_of(self, plain_peak: int) -> int:
        if self.nbytes is not None:
            return self.nbytes
        assert self.fraction is not None
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


def bytes_of_limit(given: int | str) -> int:
    """The bytes of a limit on what is saved, which may be 0, and is no fraction.

    Raises `BudgetTypeError` (a `TypeError`) and `BudgetSpellingError` (a `ValueError`).

    >>> bytes_of_limit("2KiB"), bytes_of_limit(0), bytes_of_limit("0B")
    (2048, 0, 0)
    """
    if given in (0, "0B") and not isinstance(given, bool | float):
        return 0
    nbytes = Budget.of(given).nbytes
    if nbytes is None:
        raise BudgetTypeError(
            f"saved={given!r} is a fraction, and there is nothing that it is one of: give bytes "
            "('200MiB', an int), or a budget of peak memory, of which fractions are known"
        )
    return nbytes


def _read(text: str) -> Budget:
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*|%)\s*", text)
    if match is None:
        raise _unreadable_error(text, "it is no number with a unit")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        return Budget(fraction=_fraction(number / 100, text))
    if not unit:
        if "." in match[1]:
            return Budget(fraction=_fraction(number, text))
        raise _unreadable_error(text, f"it has no unit: write '{match[1]}B' if bytes are meant")
    if unit not in _UNITS:
        near = nearest_names(unit, _UNITS)
        raise _unreadable_error(text, f"{unit!r} is no unit, {near}")
    nbytes = int(number * _UNITS[unit])
    if nbytes <= 0:
        raise _unreadable_error(text, "a budget is positive")
    return Budget(nbytes=nbytes)


def _fraction(value: float, given: object) -> float:
    if not 0 < value <= 1:  # nan is neither
        raise BudgetSpellingError(
            f"a fraction of the peak without rematerialisation is in (0, 1], but it is {given!r}. "
            "For bytes give an int, or text such as '2GiB'"
        )
    return value


def _unreadable_error(text: str, why: str) -> BudgetSpellingError:
    return BudgetSpellingError(
        f"{text!r} is no budget: {why}. A budget is bytes ('2GiB', '500MB'; an int) or a fraction "
        "of the peak without rematerialisation ('50%'; a float in (0, 1])"
    )
