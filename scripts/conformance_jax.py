"""Modules named `jax`, over PyTorch and torchremat, for JAX's own tests.

`install()` puts them among the modules of the process. A name without a counterpart skips the test
that uses it, and the reason names it. Arrays are tensors, `jax.numpy` is PyTorch's own NumPy
(`torch._numpy`), transformations are torchremat's. Their arguments are converted first, as JAX
converts them: Python numbers and NumPy arrays become tensors, of 32 bits.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
import types
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch._numpy as tnp
from absl.testing import parameterized
from torch import Tensor
from torch.utils import _pytree as pytree

import torchremat as tr
from torchremat.derivatives.symbolic_zeros import SymbolicZero

collecting = True
"""Whether the tests are being collected: what is missing then skips the tests that it decorates."""


class Missing:
    """A name without a counterpart."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __iter__(self) -> Any:
        yield Missing(f"{self._name}[0]")

    @property
    def __name__(self) -> str:  # type: ignore[override]
        return self._name

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not collecting:
            self._skip()
        functions = [a for a in args if isinstance(a, types.FunctionType | type)]
        if not functions:
            return self
        if isinstance(functions[0], type):
            return functions[0]
        return functools.wraps(functions[0])(lambda *_, **__: self._skip())

    def __instancecheck__(self, instance: Any) -> bool:
        return bool(self._skip())

    def __enter__(self) -> Any:
        self._skip()

    def __exit__(self, *_: Any) -> None:
        """Never reached."""

    def _skip(self) -> Any:
        raise unittest.SkipTest(f"not applicable: {self._name} has no counterpart")


class Dtypes(Missing):
    """`test_util.dtypes`, of which `known` exist."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        vars(self).update(known)


# --- values ---------------------------------------------------------------------------------------

NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64, torch.int64: torch.int32}


def narrow(value: Any) -> Any:
    """A tensor of 64 bits as one of 32, of which JAX's are."""
    return value.to(NARROW.get(value.dtype, value.dtype)) if isinstance(value, Tensor) else value


def as_array(value: Any) -> Any:
    """A number or a NumPy array as a tensor of 32 bits; anything else as it is."""
    if isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
        return narrow(torch.as_tensor(np.ascontiguousarray(value).reshape(np.shape(value))))
    return value.tensor if isinstance(value, tnp.ndarray) else value


def as_arrays(tree: Any) -> Any:
    """Convert the leaves of `tree`."""
    return pytree.tree_map(as_array, tree)


def as_dtype(dtype: Any) -> Any:
    """The dtype of PyTorch for one of NumPy, or its name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return getattr(torch, np.dtype(dtype).name)


def converting(function: Callable[..., Any], *, static: Sequence[int] = ()) -> Callable[..., Any]:
    """`function`, whose arguments are converted, except those at `static`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [a if i in static else as_arrays(a) for i, a in enumerate(args)]
        return function(*given, **as_arrays(kwargs))

    return call


def _as_positions(positions: Any) -> tuple[int, ...]:
    return (positions,) if isinstance(positions, int) else tuple(positions or ())


# --- jax.numpy and jax.lax ------------------------------------------------------------------------


def from_numpy(name: str) -> Any:
    """The function `name` of PyTorch's NumPy, on tensors."""
    found = getattr(tnp, name, None) or getattr(tnp.linalg, name, None)
    if isinstance(found, float):
        return found
    if not isinstance(found, types.FunctionType):
        return getattr(np, name, None) if name in np.sctypeDict else None

    def call(*args: Any, **kwargs: Any) -> Any:
        if "dtype" in kwargs:
            kwargs["dtype"] = as_dtype(kwargs["dtype"])
        kwargs.pop("precision", None)  # PyTorch's is a setting of the process
        args, kwargs = as_arrays(args), as_arrays(kwargs)
        given = [x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = pytree.tree_map(as_array, found(*args, **kwargs))
        return result if NARROW.keys() & set(given) else pytree.tree_map(narrow, result)

    return call


def _scan(
    f: Any, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, **_: Any
) -> Any:
    carry, xs = as_arrays(init), as_arrays(xs)
    leaves, spec = pytree.tree_flatten(xs)
    count = length if length is not None else len(leaves[0])
    found = []
    for i in reversed(range(count)) if reverse else range(count):
        part = [None if leaf is None else leaf[i] for leaf in leaves]
        carry, y = f(carry, pytree.tree_unflatten(part, spec))
        carry = as_arrays(carry)
        found.append(as_arrays(y))
    found = found[::-1] if reverse else found
    stack = lambda *ys: None if ys[0] is None else torch.stack(ys)  # noqa: E731
    return carry, pytree.tree_map(stack, *found, is_leaf=lambda y: y is None)


def _cond(predicate: Any, true_fun: Any, false_fun: Any, *operands: Any) -> Any:
    operands = as_arrays(operands)
    try:
        holds = bool(predicate)
    except RuntimeError:  # it is traced or mapped
        return torch.cond(predicate, true_fun, false_fun, operands)
    return (true_fun if holds else false_fun)(*operands)


def _map(f: Any, xs: Any, *, batch_size: int | None = None) -> Any:
    if not batch_size:
        return _scan(lambda carry, x: (carry, f(x)), (), xs)[1]
    return _vmap(f, chunk_size=batch_size)(xs)


def _select(where: Any, x: Any, y: Any) -> Any:
    return torch.where(as_array(where), as_array(x), as_array(y))


LAX = {
    "scan": _scan,
    "cond": _cond,
    "select": _select,
    "mul": lambda x, y: as_array(x) * as_array(y),
    "add": lambda x, y: as_array(x) + as_array(y),
    "sub": lambda x, y: as_array(x) - as_array(y),
    "map": _map,
    "stop_gradient": lambda x: pytree.tree_map(torch.detach, as_arrays(x)),
    "concatenate": lambda xs, dimension: torch.cat(as_arrays(list(xs)), dimension),
    "sort": lambda x, dimension=-1: torch.sort(as_array(x), dim=dimension).values,
    "pad": Missing("lax.pad"),
    "full_like": lambda x, value: torch.full_like(as_array(x), value),
    **{
        name: converting(getattr(tr, name))
        for name in ("psum", "pmean", "pmax", "pmin", "all_gather", "axis_index", "ppermute")
    },
}


# --- transformations ------------------------------------------------------------------------------


def _wrap(transform: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(transform)
    def make(fun: Any, *args: Any, **kwargs: Any) -> Any:
        return converting(transform(_returning_arrays(fun), *args, **kwargs))

    return make


def _returning_arrays(fun: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(fun, torch.nn.Module) or not callable(fun):
        return fun

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return as_arrays(fun(*args, **kwargs))

    return call


def _checkpoint(fun: Any = None, *, static_argnums: Any = (), **options: Any) -> Any:
    if fun is None:
        return functools.partial(_checkpoint, static_argnums=static_argnums, **options)
    found = tr.checkpoint(_returning_arrays(fun), static_argnums=static_argnums, **options)
    return converting(found, static=_as_positions(static_argnums))


def _jit(fun: Any = None, *, static_argnums: Any = (), inline: bool = False, **options: Any) -> Any:
    if fun is None:
        return functools.partial(_jit, static_argnums=static_argnums, **options)
    found = tr.jit(_returning_arrays(fun), static_argnums=static_argnums, backend="eager")
    return converting(found, static=_as_positions(static_argnums))


def _vmap(fun: Any, *args: Any, **kwargs: Any) -> Any:
    return converting(tr.vmap(_returning_arrays(fun), *args, **kwargs))


class _Skipping:
    """Skips the test that uses a method without a counterpart."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("def"):
            Missing(f"{type(self).__name__}.{name}")._skip()
        raise AttributeError(name)


class custom_jvp(_Skipping, tr.custom_jvp):  # noqa: N801 (JAX's name)
    """`torchremat.custom_jvp`, called with converted arguments."""

    def __init__(self, fun: Any, nondiff_argnums: Any = (), **options: Any) -> None:
        super().__init__(_returning_arrays(fun), nondiff_argnums, **options)

    def defjvp(self, jvp: Any, symbolic_zeros: bool = False) -> Any:
        """Set the rule."""
        super().defjvp(_returning_arrays(jvp), symbolic_zeros)
        return jvp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return converting(super().__call__, static=self.nondiff_argnums)(*args, **kwargs)


class custom_vjp(_Skipping, tr.custom_vjp):  # noqa: N801 (JAX's name)
    """`torchremat.custom_vjp`, called with converted arguments."""

    def __init__(self, fun: Any, nondiff_argnums: Any = (), **options: Any) -> None:
        super().__init__(_returning_arrays(fun), nondiff_argnums, **options)

    def defvjp(self, fwd: Any, bwd: Any, **options: Any) -> Any:
        """Set the rules."""
        return super().defvjp(_returning_arrays(fwd), _returning_arrays(bwd), **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return converting(super().__call__, static=self.nondiff_argnums)(*args, **kwargs)


class custom_vmap(_Skipping, tr.custom_vmap):  # noqa: N801 (JAX's name)
    """`torchremat.custom_vmap`, called with converted arguments."""

    def __init__(self, fun: Any) -> None:
        super().__init__(_returning_arrays(fun))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return converting(super().__call__)(*args, **kwargs)


def _linearize(fun: Any, *primals: Any, **options: Any) -> Any:
    out, push, *aux = tr.linearize(_returning_arrays(fun), *as_arrays(primals), **options)
    return out, converting(push), *aux


def _vjp(fun: Any, *primals: Any, **options: Any) -> Any:
    out, pull, *aux = tr.vjp(_returning_arrays(fun), *as_arrays(primals), **options)
    return out, converting(pull), *aux


def _jvp(fun: Any, primals: Any, tangents: Any, **options: Any) -> Any:
    return tr.jvp(_returning_arrays(fun), as_arrays(primals), as_arrays(tangents), **options)


JAX: dict[str, Any] = {
    "checkpoint": _checkpoint,
    "remat": _checkpoint,
    "checkpoint_policies": tr.checkpoint_policies,
    "jit": _jit,
    "vmap": _vmap,
    **{n: _wrap(getattr(tr, n)) for n in ("grad", "value_and_grad", "jacfwd", "jacrev", "hessian")},
    "vjp": _vjp,
    "jvp": _jvp,
    "linearize": _linearize,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "custom_vmap": custom_vmap,
    "sequential_vmap": lambda fun: converting(tr.sequential_vmap(_returning_arrays(fun))),
    "Array": Tensor,
    "SymbolicZero": SymbolicZero,
    "float0": np.dtype("float16"),
    "checkpoint_name": converting(tr.checkpoint_name),
    "saved_residuals": lambda f, *args, **kwargs: [
        tuple(residual)
        for residual in tr.saved_residuals(
            _returning_arrays(f), *as_arrays(args), **as_arrays(kwargs)
        )
    ],
    "UnexpectedTracerError": RuntimeError,
}
TREES = {
    "map": lambda f, *trees, **_: pytree.tree_map(
        lambda x, *rest: None if x is None else f(x, *rest), *trees
    ),
    "leaves": lambda tree, **_: [x for x in pytree.tree_leaves(tree) if x is not None],
    "structure": pytree.tree_structure,
    "flatten": pytree.tree_flatten,
    "unflatten": lambda spec, leaves: pytree.tree_unflatten(leaves, spec),
    "register_pytree_node": lambda cls, flatten, unflatten: pytree.register_pytree_node(
        cls,
        flatten,
        lambda children, aux: unflatten(aux, children),
        flatten_with_keys_fn=lambda tree: (
            [(pytree.SequenceKey(i), x) for i, x in enumerate(flatten(tree)[0])],
            flatten(tree)[1],
        ),
    ),
    "Partial": functools.partial,
}


# --- jax._src.test_util ---------------------------------------------------------------------------


class JaxTestCase(parameterized.TestCase):
    """JAX's class of test cases, with what its tests use of it."""

    def rng(self) -> np.random.RandomState:
        """Random numbers for the arguments of a test."""
        return np.random.RandomState(0)

    def assertAllClose(  # noqa: N802 (JAX's name)
        self, x: Any, y: Any, *, check_dtypes: bool = True, atol: Any = None, rtol: Any = None
    ) -> None:
        """Compare the leaves of two trees; dtypes are PyTorch's business."""
        left, right = pytree.tree_leaves(x), pytree.tree_leaves(y)
        self.assertEqual(len(left), len(right))
        for one, other in zip(left, right, strict=True):
            np.testing.assert_allclose(
                _as_numpy(one), _as_numpy(other), rtol=rtol or 1e-5, atol=atol or 1e-5
            )

    def assertArraysEqual(self, x: Any, y: Any, **_: Any) -> None:  # noqa: N802 (JAX's name)
        """Compare two arrays."""
        np.testing.assert_array_equal(_as_numpy(x), _as_numpy(y))

    def assertArraysAllClose(self, x: Any, y: Any, **options: Any) -> None:  # noqa: N802
        """Compare two arrays."""
        self.assertAllClose(x, y, **options)


def _as_numpy(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _check_grads(f: Any, args: Any, order: int, *_: Any, **__: Any) -> None:
    wide = pytree.tree_map(lambda x: x.double(), as_arrays(args))
    tr.testing.check_grads(_returning_arrays(f), *wide, order=min(order, 2))


def _pass_through(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


TESTING = {
    "JaxTestCase": JaxTestCase,
    "BufferDonationTestCase": JaxTestCase,
    "check_grads": _check_grads,
    "thread_unsafe_test": _pass_through,
    "with_config": _pass_through,
    "dtypes": Dtypes("dtypes", all=[np.float32, np.int32, np.bool_], custom_floats=[np.float16]),
    "rand_default": lambda rng: lambda shape, dtype: rng.randn(*shape).astype(dtype),
    "format_shape_dtype_string": lambda shape, dtype: f"{np.dtype(dtype).name}{list(shape)}",
}


# --- modules --------------------------------------------------------------------------------------


def find_name(module: str, name: str) -> Any:
    """What stands for `name` in the module `module`; a `Missing` if nothing does."""
    last = module.rpartition(".")[2]
    tables: dict[str, dict[str, Any]] = {"lax": LAX, "tree": TREES, "test_util": TESTING}
    if last == "tree_util":
        name = name.removeprefix("tree_")
        return TREES.get(name, Missing(f"{module}.{name}"))
    if name in tables.get(last, {}):
        return tables[last][name]
    if last in {"numpy", "lax", "linalg"}:
        found = from_numpy(name)
        return Missing(f"{module}.{name}") if found is None else found
    if last in {"errors", *tables} or name not in JAX:
        return JAX.get(name) if last == "errors" and name in JAX else Missing(f"{module}.{name}")
    return JAX[name]


MODULES = {
    *("_src", "ad_checkpoint", "api", "custom_batching", "custom_derivatives", "errors", "lax"),
    *("linalg", "numpy", "test_util", "tree", "tree_util"),
}
"""Modules of JAX of which there is something here; all others are `Missing`."""


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        return find_name(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "jax":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing: names are found when they are read."""


def install() -> None:
    """Let `import jax` find these modules, and give tensors the methods of JAX's arrays."""
    sys.meta_path.insert(0, _Finder())
    tnp_array: Any = Tensor
    tnp_array.astype = lambda self, dtype: self.to(as_dtype(dtype))
    tnp_array.block_until_ready = lambda self: self
