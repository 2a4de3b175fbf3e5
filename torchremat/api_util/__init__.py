"""Arguments of transformed functions: static, donated, flattened, given axes.

The counterpart of `jax.api_util`, for trees as `torch.utils._pytree` knows them, in which `None`
is a leaf. It knows neither graphs nor policies. Begin with `static_arguments.py`.
"""

from torchremat.api_util.axes import flatten_axes
from torchremat.api_util.donation_vectors import donation_vector, rebase_donate_argnums
from torchremat.api_util.flattening import (
    ArgnumsPartial,
    apply_flat_fun,
    apply_flat_fun_nokwargs,
    argnums_partial,
    flatten_fun,
    flatten_fun_nokwargs,
)
from torchremat.api_util.hashing import WrapHashably, same_value
from torchremat.api_util.static_arguments import (
    ArgumentSelection,
    StaticArguments,
    as_argnames,
    as_argnums,
    check_argnums,
    parameters_of,
)

__all__ = [
    "ArgnumsPartial", "ArgumentSelection", "StaticArguments", "WrapHashably", "apply_flat_fun",
    "apply_flat_fun_nokwargs", "argnums_partial", "as_argnames", "as_argnums", "check_argnums",
    "donation_vector", "flatten_axes", "flatten_fun", "flatten_fun_nokwargs", "parameters_of",
    "rebase_donate_argnums", "same_value",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
