"""Lets torchvision be imported where its own operators can not be loaded.

PyPI's wheel of torchvision links against CUDA, so that its library does not load beside a PyTorch
for CPUs. Its Python registers shapes for two operators, which must exist for that.
"""

import torch

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[torch.library.Library] = []


def declare_torchvision_operators() -> None:
    """Declare the operators without a kernel, unless the library is there; once."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name, schema in _SCHEMAS.items():
            library.define(name + schema)
        _libraries.append(library)  # which undoes the definitions when it goes
