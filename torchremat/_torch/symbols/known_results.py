"""Results of operators on fake tensors with symbols for sizes, found once for equal arguments.

PyTorch finds a result by rules in Python, which ask much of each symbol: 2 to 5 ms an operator.
Alike layers ask the same for each layer. PyTorch's own cache serves no trace with symbols in it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.sym_node import SymNode

Key: TypeAlias = tuple[Any, ...]

_PLAIN = (int, float, complex, bool, str, type(None))
_SETTINGS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TAGS = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)


class _UntoldError(Exception):
    """An argument or a result that a key or an entry cannot tell of."""


class _TensorForm(NamedTuple):
    """The metadata of which a new fake tensor is made.

    Attributes:
        view_of: the position among the tensor arguments of the one whose memory it shares.
    """

    shape: torch.Size
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    view_of: int | None


class KnownResults:
    """The results that one mode has found, by operator and arguments.

    The guards that a rule made when it found a result hold for the whole trace.
    """

    def __init__(self) -> None:
        self._found: dict[Key, Any] = {}
        self._is_cacheable: dict[Any, bool] = {}

    def find(
        self,
        mode: FakeTensorMode,
        func: Any,
        arguments: Any,
        find_anew: Callable[[], Any],
    ) -> Any:
        """The result of `func`; `find_anew` finds one that is not known."""
        if not self._may_keep(func):
            return find_anew()
        tensors: list[FakeTensor] = []
        try:
            key = _make_key(mode, func, arguments, tensors)
        except _UntoldError:
            return find_anew()
        known = self._found.get(key)
        if known is not None:
            return _make_results(mode, known, tensors)
        results = find_anew()
        form = _describe(results, tensors)
        if form is not None:
            self._found[key] = form
        return results

    def _may_keep(self, func: Any) -> bool:
        known = self._is_cacheable.get(func)
        if known is None:
            known = self._is_cacheable[func] = _returns_new_metadata(func)
        return known


def _returns_new_metadata(func: Any) -> bool:
    """Whether results are tensors that only the metadata of arguments decides on."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    schema = func._schema
    return (
        not schema.is_mutable
        and bool(schema.returns)
        and all(isinstance(r.type, torch.TensorType) for r in schema.returns)
        and _TAGS.isdisjoint(func.tags)
        and func is not torch.ops.aten.as_strided.default  # which asks for the size of the memory
    )


def _make_key(mode: FakeTensorMode, func: Any, arguments: Any, tensors: list[FakeTensor]) -> Key:
    key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    key.append(torch.is_grad_enabled())
    _add_arguments(key, mode, arguments, tensors)
    if not tensors:  # a factory function depends on defaults, too
        raise _UntoldError
    return tuple(key)


def _add_arguments(
    key: list[Any], mode: FakeTensorMode, args: Iterable[Any], tensors: list[FakeTensor]
) -> None:
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            _add_tensor(key, mode, arg)
            tensors.append(arg)
        elif kind in _PLAIN or isinstance(arg, _SETTINGS):
            key += (kind, arg)
        elif kind is SymInt:
            key.append(_expression_of(arg))
        elif kind in (tuple, list, torch.Size):
            key += (kind, len(arg))
            _add_arguments(key, mode, arg, tensors)
        elif isinstance(arg, dict):
            key += (kind, *arg)
            _add_arguments(key, mode, arg.values(), tensors)
        else:
            raise _UntoldError


def _add_tensor(key: list[Any], mode: FakeTensorMode, tensor: FakeTensor) -> None:
    is_plain = (
        tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )
    if not is_plain:
        raise _UntoldError
    shape = tensor.shape
    key += (tensor.dtype, tensor.fake_device, tensor.requires_grad, tensor.is_inference())
    key.append(len(shape))
    for n in (*shape, *tensor.stride(), tensor.storage_offset()):
        key.append(_expression_of(n) if type(n) is SymInt else n)


def _expression_of(size: SymInt) -> Any:
    node = size.node
    if not isinstance(node, SymNode):  # of a jagged tensor
        raise _UntoldError
    return node._expr


def _describe(results: Any, tensors: list[FakeTensor]) -> Any:
    """The forms of `results`; `None` where they tell too little."""
    if isinstance(results, tuple):
        forms = [None if r is None else _describe_tensor(r, tensors) for r in results]
        is_told = all(f is not None or r is None for f, r in zip(forms, results, strict=True))
        return tuple(forms) if is_told else None
    return _describe_tensor(results, tensors)


def _describe_tensor(result: Any, tensors: list[FakeTensor]) -> _TensorForm | None:
    if type(result) is not FakeTensor or any(result is t for t in tensors):
        return None
    is_plain = (
        result.constant is None
        and result.layout is torch.strided
        and not result.is_conj()
        and not result.is_neg()
        and not result._is_zerotensor()
        and not result.requires_grad
    )
    if not is_plain:
        return None
    storage = result.untyped_storage()._cdata
    shared = [i for i, t in enumerate(tensors) if t.untyped_storage()._cdata == storage]
    offset = result.storage_offset()
    if len(shared) > 1 or (not shared and (type(offset) is SymInt or offset)):
        return None
    dtype, device = result.dtype, result.fake_device
    view_of = shared[0] if shared else None
    return _TensorForm(result.shape, result.stride(), offset, dtype, device, view_of)


def _make_results(mode: FakeTensorMode, known: Any, tensors: list[FakeTensor]) -> Any:
    shapes = mode.shape_env
    assert shapes is not None, "there are symbols"
    with in_kernel_invocation_manager(mode), shapes.suppress_guards():
        if isinstance(known, _TensorForm):
            return _make_tensor(mode, known, tensors)
        return tuple(None if f is None else _make_tensor(mode, f, tensors) for f in known)


def _make_tensor(mode: FakeTensorMode, form: _TensorForm, tensors: list[FakeTensor]) -> Tensor:
    made = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
    if form.view_of is not None:
        storage = tensors[form.view_of].untyped_storage()
        made.set_(storage, form.offset, form.shape, form.strides)
    return FakeTensor(mode, made, form.device)
