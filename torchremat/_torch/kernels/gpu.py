"""The part of a GPU that decides which kernels PyTorch takes."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU by its architecture: `sm_90` of NVIDIA, `gfx942` of AMD.

    >>> Gpu("sm_103").version, Gpu("gfx942").is_rocm
    ((10, 3), True)
    """

    arch: str
    kind = "cuda"
    """PyTorch calls such devices so, those of AMD too."""

    @property
    def is_rocm(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def version(self) -> tuple[int, int]:
        """The compute capability of a GPU of NVIDIA; `(0, 0)` of one of AMD."""
        found = re.fullmatch(r"sm_(\d+)(\d)", self.arch)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def is_between(self, least: tuple[int, int], most: tuple[int, int]) -> bool:
        return least <= self.version <= most
