"""Arrays of Python and NumPy that are small enough to compare at each call."""

from typing import Any

# Chosen by hand: what has more is data, not a setting or a counter.
_MOST_BYTES = 4096


def is_small_array(value: Any) -> bool:
    """Whether it is an array of Python or NumPy, whose few numbers may change in place."""
    return contents_of(value) is not None


def contents_of(value: Any) -> bytes | None:
    """The bytes of a small array; `None` for anything else.

    >>> contents_of(bytearray(b"ab")), contents_of([1, 2])
    (b'ab', None)
    """
    if not hasattr(type(value), "tobytes") and type(value) is not bytearray:
        return None
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):  # of objects, or of a kind of its own
        return None
    return view.tobytes() if view.nbytes <= _MOST_BYTES else None
