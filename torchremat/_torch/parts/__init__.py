"""The table of all private and experimental names of PyTorch that the library uses.

A test compares it with the source: there is no use without a row, and no row without a use.
`find_all_missing(all_parts())` says what an installed PyTorch lacks. Begin with `part.py`; the rows
are in one file for each area. Patches have a table of their own, outside of this room, of which
nothing is imported here. `patched.py` says what was tried instead of each.
"""

from collections.abc import Iterator

from .compiler_parts import COMPILERS
from .engine_parts import ENGINE
from .gpu_parts import GPU_PARTS
from .level_parts import LEVELS
from .part import PrivatePart as PrivatePart
from .part import find_all_missing as find_all_missing
from .patched import ALTERNATIVES as ALTERNATIVES
from .tensor_parts import TENSORS
from .trace_parts import TRACES

AREAS = {
    "Levels of torch.func and forward mode": LEVELS,
    "The engine of autograd, and operators": ENGINE,
    "Tensors, modules and trees": TENSORS,
    "Traces": TRACES,
    "Compilers": COMPILERS,
    "Kernels of GPUs": GPU_PARTS,
}
"""The rows by area."""


def all_parts() -> Iterator[PrivatePart]:
    """Yield every row."""
    for parts in AREAS.values():
        yield from parts
