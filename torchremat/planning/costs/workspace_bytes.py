"""An allowance for the workspaces that libraries take on a GPU, beside all tensors of a step.

cuBLAS and hipBLASLt take theirs once, of a size that PyTorch chooses by the GPU. cuDNN takes one
for each convolution, of an algorithm that it finds on the device. It converts layouts in it: the
allowance is a copy of what the convolution reads and writes. Kernels of attention sum the gradient
of the queries in float32.
"""

import os
import re
from collections.abc import Iterable

from torch import Tensor, fx

from torchremat import _torch
from torchremat.graph.ops import packet_name
from torchremat.planning.costs.device_rates import Rates, arch_of
from torchremat.remat.program.compiled_graph import CompiledGraph

# As in PyTorch 2.13: `getChosenWorkspaceSize` of aten/src/ATen/cuda/CublasHandlePool.cpp, and for
# hipBLASLt aten/src/ATen/cuda/CUDABlas.cpp.
_BLAS_HOPPER, _BLAS_OLDER, _BLAS_ROCM = 32 << 20, 8_519_680, 76 << 20


def allow_workspace(graphs: Iterable[CompiledGraph], rates: Rates) -> int:
    """The bytes of workspaces to allow for a step: those of the BLAS, and the largest other one.

    It is 0 where `rates` are of no GPU. `CUBLAS_WORKSPACE_CONFIG` holds, as in PyTorch.
    """
    arch = arch_of(rates)
    if arch is None:
        return 0
    nodes = [node for graph in graphs for node in graph.module.graph.nodes]
    calls = [node for node in nodes if node.op == "call_function"]
    multiplies = any(packet_name(call.target).endswith("mm") for call in calls)
    blas = _blas_nbytes(_torch.Gpu(arch)) if multiplies else 0
    return blas + max(map(_count_own, calls), default=0)


def _blas_nbytes(gpu: _torch.Gpu) -> int:
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if asked:
        return sum(int(kib) * 1024 * int(count) for kib, count in asked)
    if gpu.is_rocm:
        return _BLAS_ROCM
    return _BLAS_HOPPER if gpu.version >= (9, 0) else _BLAS_OLDER


def _count_own(node: fx.Node) -> int:
    name = packet_name(node.target)
    if name in ("aten.convolution", "aten.convolution_backward"):
        read = (_nbytes(source.meta.get("val")) for source in node.all_input_nodes)
        return sum(read) + _nbytes(node.meta.get("val"))
    if "scaled_dot_product" in name and name.endswith("attention_backward"):
        query = node.all_input_nodes[1].meta.get("val")
        return 4 * _torch.hint_of(query.numel()) if isinstance(query, Tensor) else 0
    return 0


def _nbytes(value: object) -> int:
    values = value if isinstance(value, tuple | list) else (value,)
    tensors = (v for v in values if isinstance(v, Tensor))
    return sum(_torch.hint_of(v.numel()) * v.element_size() for v in tensors)
