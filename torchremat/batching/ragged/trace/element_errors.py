import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

from torchremat import _torch
from torchremat.core.source import Source, is_user_file, source_of_error
from torchremat.errors import RaggedError, TorchrematError
from torchremat.graph.symbolic_sizes import format_size


@contextmanager
def explain_mismatches(
    elements: Sequence[tuple[int, ...]], symbols: dict[int, torch.SymInt]
) -> Iterator[None]:
    """Say of an error about symbols which dims of which inputs they are, and raise `RaggedError`.

    `elements` are the shapes of an element of each input; `symbols` belong to the numbers in them.
    """
    try:
        yield
    except RuntimeError as error:
        names = {format_size(size): number for number, size in symbols.items()}
        met = [name for name in names if name in str(error)]
        if isinstance(error, TorchrematError) or not met:
            raise
        places = "; ".join(
            f"{name} is the size of dim {shape.index(names[name])} of input {i}"
            for name in met
            for i, shape in enumerate(elements)
            if names[name] in shape
        )
        source = source_of_error(error)
        where = "" if source is None else f" at {source}"
        raise RaggedError(
            f"sizes that differ from element to element do not fit{where}: "
            f"{str(error).removesuffix(')')}. Here {places}. Two sizes are one if their lengths "
            "are equal in all elements."
        ) from error


_ABOUT_SIZES = (
    *(
        os.path.join(os.path.dirname(torch.__file__), *place)
        for place in (("__init__.py",), ("fx", "experimental"))
    ),
    os.path.dirname(os.path.abspath(__file__)),
    os.path.dirname(os.path.abspath(_torch.__file__)),
)
"""Code between the line that asks about a size and the answer."""

_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__", "__round__", "__trunc__")


def find_asking_line() -> Source | None:
    """Find the user's line that needs the value of a size; `None` if PyTorch's code does."""
    frame: FrameType | None = sys._getframe(1)
    method = ""
    while frame is not None and frame.f_code.co_filename.startswith(_ABOUT_SIZES):
        method = frame.f_code.co_name
        frame = frame.f_back
    if frame is None or method not in _CONVERSIONS or not is_user_file(frame.f_code.co_filename):
        return None
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
