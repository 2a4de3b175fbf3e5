"""Counts of bytes: alive at each moment, and saved by autograd for the backward pass.

Both count *storages* at their full size, each once however many tensors lie in it. PyTorch creates
one Python object for a storage, at its first use. It lives until the storage is freed, even if only
C++ refers to the storage. So a weak reference to that object tells when the storage is freed.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch

from torchremat._torch import HigherOrderOperator, TorchDispatchMode, version_of
from torchremat.core.storages import storages_in
from torchremat.remat.offload.host_pool import holds

# torch.tensor(...) makes its storage unseen by dispatch modes and then passes it through this one
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class HeldTensor(NamedTuple):
    """A storage that autograd saves: shape and dtype of the first tensor in it, and all its bytes.

    A saved view keeps its whole base alive: `nbytes` may be more than `shape` needs.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages made by operators inside a `with` block, and their peak.

    A storage counts from the operator that returns it until it is freed, on every device but
    `meta`. An older one counts from a call of `add`. Storages that are freed after the block stop
    counting, too. Memory that a kernel allocates and frees within itself is not seen, nor are
    storages that no operator made (`torch.from_numpy`), unless they are added. A storage resized
    through `UntypedStorage.resize_` counts at its new size from the next operator that returns a
    tensor in it.

    The peak is taken after each operator, when what it read and what it wrote are both alive.
    Operators inside `torch.cond` and other higher-order operators are seen. Functions of
    `torch.compile` run as they are, uncompiled.

    >>> x = torch.ones(256)                    # 1024 bytes, made before
    >>> with LiveBytes() as memory:
    ...     y = (x + 1).exp().sum()            # x + 1 and its exp are alive together
    >>> memory.peak, memory.live
    (2048, 4)
    >>> del y
    >>> memory.live
    0
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = _Storages()
        self._peak = 0
        self._stances: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        # Dynamo skips a frame that it meets under a mode, and ever after: `torch.cond` would fail
        self._stances.append(torch.compiler.set_stance("force_eager"))
        self._stances[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stances.pop().__exit__(*exception)

    @property
    def live(self) -> int:
        """Bytes of the counted storages that are alive now."""
        return self._storages.nbytes

    @property
    def peak(self) -> int:
        """The most bytes alive at one time since the start or the last `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Forget the peak: it becomes the bytes alive now."""
        self._peak = self.live

    def add(self, *trees: Any) -> None:
        """Count the storages of the tensors in `trees` too; a module stands for its state.

        `trees` are pytrees of tensors and `nn.Module`s (parameters and buffers); other leaves do
        not count.

        >>> memory = LiveBytes()
        >>> memory.add(torch.nn.Linear(3, 2).requires_grad_(False))
        >>> memory.peak                        # 4 bytes x (3 x 2 + 2)
        32
        """
        for storage in storages_in(trees):
            self._count(storage)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            args, kwargs = (_map_functions(self._watch, args), _map_functions(self._watch, kwargs))
        out = func(*args, **kwargs)
        # an unknown storage that an argument has as well is an older one, seen through a view
        older = () if func is _LIFT_FRESH else tuple(storages_in((args, kwargs)))
        for storage in storages_in(out):
            if storage in self._storages or not any(storage is other for other in older):
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            self._storages.put(storage)
            self._peak = max(self._peak, self.live)

    def _watch(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return body(*args, **kwargs)

        return run


class HeldBytes:
    """Counts the bytes that autograd saves for operators inside a `with` block.

    Tensors among the arguments do not count: trees of tensors, and `nn.Module`s for their
    parameters and buffers. Every other saved tensor counts until its node has run backward or is
    freed; `torch.autograd.graph.saved_tensors_hooks` finds it. The hooks return the same tensors,
    so that the numbers of the training do not change. A tensor that is changed in place still
    raises when the backward pass reads it. Offloaded values are in the host's memory and do not
    count; `host_stats` counts them. Tensors that an `autograd.Function` stores on its `ctx` in
    another way are not seen. PyTorch refuses such hooks under `torch.func.grad`, `vjp` and
    `jacrev`.

    Inside the block `total` and `tensors` are those of now, after it those of its end: put the
    forward pass in it, and the backward pass after it. Each block counts anew.

    >>> w = torch.ones(4, 4, requires_grad=True)
    >>> x = torch.ones(8, 4)
    >>> with HeldBytes(w, x) as held:
    ...     loss = (x @ w).exp().sum()         # mm needs w and x, exp needs its result
    >>> held.total, held.tensors
    (128, [HeldTensor(shape=(8, 4), dtype=torch.float32, nbytes=128)])
    >>> loss.backward()
    """

    def __init__(self, *excluded: Any) -> None:
        self._excluded = _Storages()
        for storage in storages_in(excluded):
            self._excluded.put(storage)
        self._saved: list[weakref.ref[_Saved]] = []
        self._at_exit: list[HeldTensor] | None = None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.unpack)

    @property
    def total(self) -> int:
        """Bytes of the storages that autograd saves, each once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[HeldTensor]:
        """One entry for each saved storage, in the order in which they were saved."""
        return self._list_saved() if self._at_exit is None else self._at_exit

    def __enter__(self) -> Self:
        self._at_exit = None
        self._saved = []
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        self._at_exit = self._list_saved()

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        saved = _Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def _list_saved(self) -> list[HeldTensor]:
        found = []
        seen = _Storages()
        for reference in self._saved:
            saved = reference()
            if saved is None:
                continue
            nbytes = 0
            for storage in storages_in(saved.tensor):
                if holds(storage):
                    continue
                if storage not in seen and storage not in self._excluded:
                    seen.put(storage)
                    nbytes += storage.nbytes()
            if nbytes:
                found.append(HeldTensor(tuple(saved.tensor.shape), saved.tensor.dtype, nbytes))
        return found


class _Saved:
    """Autograd stores this object in place of a tensor, and frees it as it would the tensor."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A saved result has the node that saves it as grad_fn: a cycle that nothing would free.
        # Detached, it has the same storage and version.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version_of(tensor)

    def unpack(self) -> torch.Tensor:
        """PyTorch leaves the check of the version to hooks."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.tensor.dtype} of shape {tuple(self.tensor.shape)} is at "
                f"version {version_of(self.tensor)}; expected version {self.version}. Change a "
                "copy of it, or change it after the backward pass"
            )
        return self.tensor


class _Storages:
    """A set of storages and the sum of their bytes; a freed storage leaves by itself."""

    def __init__(self) -> None:
        self.nbytes = 0
        # By id: Python reuses it for another storage only after the reference's callback ran.
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return id(storage) in self._entries

    def put(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        nbytes = storage.nbytes()
        if key in self._entries:
            reference, old_nbytes = self._entries[key]
        else:
            reference, old_nbytes = weakref.ref(storage, self._make_remover(key)), 0
        self._entries[key] = reference, nbytes
        self.nbytes += nbytes - old_nbytes

    def _make_remover(self, key: int) -> Callable[[object], None]:
        # A weak reference, so that a long-lived parameter does not keep every set alive.
        myself = weakref.ref(self)

        def remove(_: object) -> None:
            storages = myself()
            if storages is not None:
                _, nbytes = storages._entries.pop(key)
                storages.nbytes -= nbytes

        return remove


def _map_functions(wrap: Callable[[Any], Any], arguments: Any) -> Any:
    if isinstance(arguments, dict):
        return {
            name: wrap(value) if callable(value) else value for name, value in arguments.items()
        }
    return tuple(wrap(value) if callable(value) else value for value in arguments)
