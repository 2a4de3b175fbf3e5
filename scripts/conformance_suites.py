"""The test suites of other projects that torchremat runs, and what of them is not its own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

TRANSFORMS = (
    "grad",
    "grad_and_value",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "linearize",
    "vjp",
    "vmap",
)
TORCH_NAMES = {
    **{
        f"torch.utils.checkpoint.{name}": f"conformance_torch.{name}"
        for name in ("checkpoint", "checkpoint_sequential")
    },
    **{
        f"{module}.{name}": f"conformance_torch.{name}"
        for module in ("torch.func", "functorch")
        for name in TRANSFORMS
    },
    "torch.vmap": "conformance_torch.vmap",
}


NAMES: dict[str, Mapping[str, str]] = {"pytorch": TORCH_NAMES, "jax": {}}
"""By project: from the names that its tests import to those that take their place."""

SOURCES = {
    "pytorch": ("https://github.com/pytorch/pytorch", "v2.13.0", "test"),
    "jax": ("https://github.com/jax-ml/jax", "jax-v0.11.0", "tests"),
}
"""By project: where its tests are: a repository, a tag and a folder."""


OF_HOOKS = "reads what the saved-tensor hooks of PyTorch's checkpoint do; here a graph is replayed"
REENTRANT = "asks for an error or warning of the reentrant checkpoint, which works here"
WORDS = "asks for functorch's words and classes of errors; here they are JAX's"
RUNS_AGAIN = "counts how often Python runs again; a graph is replayed, and Python does not"

ERROR_WORDS = "asks for JAX's words; the error here names the same things"
WORKS = "asks for an error, but this works here"
FLOAT0 = "PyTorch has no dtype float0: a tangent of integers is None"
NONE = "None is a leaf of PyTorch's trees, and no tree without leaves"
ARRAYS = "uses a method or an index of NumPy's arrays that tensors do not have"


@dataclass(frozen=True)
class Suite:
    """Tests of another project in one file."""

    project: str
    path: str
    classes: tuple[str, ...] = ("",)
    """The classes of the file; "" is the whole file."""
    select: str = ""
    """What of them runs, as `pytest -k` selects it."""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Why a test whose name (`Class::test_name`) has this pattern fails, if it does."""

    def reason_against(self, name: str) -> str | None:
        """Why the test `name` is not applicable; `None` if it is."""
        return next(
            (why for what, why in self.not_applicable.items() if re.search(what, name)), None
        )


SUITES = {
    "torch-autograd": Suite(
        "pytorch",
        "test/test_autograd.py",
        select="checkpoint or access_saved_tensor_twice_without",
        not_applicable={
            "access_saved_tensor_twice|custom_function_works": OF_HOOKS,
            "valid_reset_on_error|detached_tensor_use_reentrant_True": REENTRANT,
            "warns_if_use_reentrant|context_fn": REENTRANT,
            "set_early_stop|storage_lifetime|policy_with_state|version_counter": RUNS_AGAIN,
            "detects_non_determinism|only_trigger": RUNS_AGAIN,
        },
    ),
    "torch-utils": Suite(
        "pytorch",
        "test/test_utils.py",
        ("TestCheckpoint",),
        not_applicable={
            "checkpoint_trigger": RUNS_AGAIN,
            "checkpoint_valid|partial_grad": REENTRANT,
        },
    ),
    "torch-dynamo": Suite("pytorch", "test/dynamo/test_activation_checkpointing.py"),
    "functorch-transforms": Suite(
        "pytorch",
        "test/functorch/test_eager_transforms.py",
        not_applicable={
            "conj_bit|tolist_conj": "JAX's convention: complex gradients are not conjugated",
            r"_aux_(pytree|tensor)|test_aux_": WORDS,
            "(empty|float|negative|bounds|repeated|invalid)_argnums": WORDS,
            "(complex|pytree)_error|error_cases|length_mismatch|outputs_can_any": WORDS,
            "inputs_are_tuples_of_tensors|nonempty_primals": WORDS,
            "deprecation|grad_deprecated": "tests that functorch's old names warn",
            "empty_output": "asks for an error; the Jacobian of nothing is () here, as in JAX",
            "functional_jacfwd_inside|make_fx_vjp": WORDS,
            "grad_name_wrapping": "JAX's convention: the gradient of f is called grad(f)",
        },
    ),
    "functorch-vmap": Suite(
        "pytorch",
        "test/functorch/test_vmap.py",
        select="not TestVmapOperatorsOpInfo",
        not_applicable={
            "err_msg|raises|throws|fallback_zero_dim|chunksize_error|no_inputs|no_tensors": WORDS,
            "out_dims_none|test_where_cpu": WORDS,
            "out_dims_edge_case|inplace_fallback_unary": "JAX's convention: out_axes=(0,) is for a"
            " tuple of one",
            "NestedTensor": "maps nested tensors of the strided layout; a Pile takes jagged ones",
            "autograd_function_transform_(jvp|vjp)": "calls vjp and jvp without primals",
            "_is_(all|any)_true": "gives a keyword argument that is not mapped; in JAX all are",
        },
    ),
    "jax-remat": Suite(
        "jax",
        "tests/api_test.py",
        ("RematTest",),
        not_applicable={
            "concreteness_error": "catches a class of JAX's errors that has no counterpart",
            "escaped_tracer": WORKS,
            "constants_not_hoisted|no_cse_widget|partial_cse": "reads JAX's lowered text",
            "excess_precision": "gives NumPy the dtype bfloat16, which it has not",
            "custom_policy_save|checkpoint_dots": "reads the jaxpr of what linearize returns",
            "residual_logging": "asks for JAX's words in the log",
        },
    ),
    "jax-linearize": Suite(
        "jax",
        "tests/api_test.py",
        ("APITest",),
        "linearize or vjp or jvp or hessian or jac",
        {
            "complex|holomorphic": "there is no option holomorphic, and no check for it",
            "bool_vjp|of_int|convert_element": FLOAT0,
            "with_refs|vjp3": "vjp3 and references are JAX's own",
            "mismatched|non_tuple|aval_error|bad_cotangent|too_many|error_message": ERROR_WORDS,
            "fun_jit": "returns a pull-back from jit: it is a Python function here",
        },
    ),
    "jax-custom": Suite(
        "jax",
        "tests/custom_api_test.py",
        ("CustomJVPTest", "CustomVJPTest", "CustomVmapTest", "CustomApiTest"),
        not_applicable={
            "pair_error|structures_error|disagreement_error|kwargs_error|jvp_error": ERROR_WORDS,
            "non_tuple_error": ERROR_WORDS,
            "tracer_error|partial_eval_raises": WORKS,
            "float0": FLOAT0,
            "nones_returned|tree_with_nones": NONE,
            "nestable_vjp": "returns a pull-back from jit: it is a Python function here",
            "remat_custom_vmap": "multiplies an array of NumPy, on the left, by a traced tensor",
            "hard_stuff2": "gives a dtype of PyTorch to NumPy",
            "symbolic_zero_custom_(jvp|vjp)$": "asks for a Python number, which is a tensor here",
            "bwd_shape_error": "a symbolic zero of another shape is zero, and no error, here",
        },
    ),
    "jax-batching": Suite(
        "jax",
        "tests/batching_test.py",
        not_applicable={
            "GatherTiled|NumpyIndexing|IndexAdd|RevNumpy|Issue354": ARRAYS,
            "NonJaxTypedOutput": ERROR_WORDS,
        },
    ),
}
