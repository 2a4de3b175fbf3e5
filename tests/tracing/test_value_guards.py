"""A branch on the value of a mask is answered, and each call is served by its own answers."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import assert_same
from torchremat.errors import ConcretizationError, RetraceWarning

_CODE = """
def skips(x, mask):
    return x.sin() * 2 if mask.all() else x.sin() * mask

def skips_by_item(x, mask):
    return x.sin() * 2 if (mask == 1).all().item() else x.sin() * mask

def contains(x, tokens):
    return x.sin() * 2 if 0 in tokens[:, [-1, 0]] else x.cos()

def writes_first(x, mask):
    mine = mask.clone()
    mine *= mask
    return x.sin() * 2 if mine.all() else x.sin() * mask

def asks_twice(x, mask):
    y = x.sin() * 2 if mask.all() else x.sin()
    return y.cos() if mask.any() else y * 3

def asks_if_it_is_fake(x, mask):
    if not isinstance(mask, torch._subclasses.FakeTensor) and mask.all():
        return x.sin() * 2
    return x.sin() * mask * 3

def drops(x):
    for _ in range(3):
        x = x.sin()
        if torch.rand([]) < 0.0:
            continue
        x = x * torch.rand([])
    return x

def drops_some(x):
    return x if torch.rand([]) < 0.5 else x.sin()

def compares(x, mask):
    return x.sin() * 2 if torch.equal(mask, torch.ones_like(mask)) else x.sin() * mask

def counts(x, mask):
    return x.sin() * 2 if mask.sum() > 5 else x.sin() * mask

def makes_a_mask(x, mask):
    return x.sin() * 2 if mask.float().bool().all() else x.sin() * mask

def asks_what_it_made(x, mask):
    return x.sin() if torch.ones(3).all() else x * mask

def asks_a_weight(x, w):
    return x.sin() if (w > 0).all() else x

def asks_for_a_sum(x, y):
    return x.sin() if y.sum() > 0 else x

def asks_for_signs(x, y):
    return x.sin() if (y > 0).all() else x

def asks_for_a_number(x, y):
    return x.sin() if y[0, 0] else x

def asks_long(x, mask):
    y = mask
    for _ in range(40):
        y = y * mask
    return x.sin() if y.all() else x

def writes_through_a_view(x, mask):
    mine = mask.clone()
    mine[0].zero_()
    return x.sin() if mine.all() else x

def writes_to_the_argument(x, mask):
    mask.zero_()
    return x.sin() if mask.all() else x
"""


def functions_of_a_user():
    functions = {"torch": torch, "__name__": "my_models.masks"}
    exec(compile(_CODE, "masks.py", "exec"), functions)
    return functions


HERE = functions_of_a_user()
ONES, SOME = torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [1, 1, 1]])


def assert_differentiates_as(found, expected):
    assert_same(found[:2], expected[:2])
    assert_same(found[2], expected[2], close=True)


def gradients_of(function, x, *rest):
    """The value, and the first and second derivatives."""
    x = x.clone().requires_grad_()
    y = function(x, *rest)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.square().sum(), x)
    return y.detach(), dx.detach(), again


@pytest.mark.parametrize(
    "name",
    [
        "skips",
        "skips_by_item",
        "compares",
        "counts",
        "makes_a_mask",
        "writes_first",
        "asks_twice",
        "asks_what_it_made",
        "asks_if_it_is_fake",
    ],
)
def test_each_call_has_its_own_answers(name):
    plain = HERE[name]
    checkpointed = tr.checkpoint(plain)
    x = torch.randn(2, 3)
    for mask in (SOME, ONES, torch.zeros_like(ONES), ONES, SOME):
        found, expected = (gradients_of(f, x, mask) for f in (checkpointed, plain))
        assert_differentiates_as(found, expected)


def test_what_is_asked_of_tokens():
    checkpointed = tr.checkpoint(HERE["contains"])
    x = torch.randn(2, 3)
    for tokens in (SOME, ONES, SOME):
        assert_same(checkpointed(x, tokens), HERE["contains"](x, tokens))


def test_what_has_no_value_is_fake():
    asks = tr.checkpoint(HERE["asks_if_it_is_fake"])
    assert asks(torch.ones(2, 3, device="meta"), ONES.to("meta")).shape == (2, 3)


def test_calls_with_the_same_answers_share_a_trace():
    runs = []

    def function(x, mask):
        runs.append(1)
        return HERE["skips"](x, mask)

    checkpointed = tr.checkpoint(function)
    for mask in (SOME, ONES, SOME.flip(0), ONES, SOME):
        checkpointed(torch.randn(2, 3, requires_grad=True), mask).sum().backward()
    assert len(runs) == 2


def test_the_arguments_are_let_go_of():
    checkpointed = tr.checkpoint(HERE["skips"])
    mask = SOME.clone()
    gone = weakref.ref(mask)
    checkpointed(torch.randn(2, 3), mask)
    del mask
    gc.collect()
    assert gone() is None


def test_what_is_closed_over_is_asked_anew():
    mask = {"mask": SOME}
    skips = HERE["skips"]
    checkpointed = tr.checkpoint(lambda x: skips(x, mask["mask"]))
    x = torch.randn(2, 3)
    for mask["mask"] in (SOME, ONES, SOME):
        assert_same(checkpointed(x), skips(x, mask["mask"]))


def test_a_layer_is_never_skipped_with_probability_0():
    x = torch.randn(3)
    torch.manual_seed(0)
    expected, state = gradients_of(HERE["drops"], x), torch.get_rng_state()
    torch.manual_seed(0)
    assert_differentiates_as(gradients_of(tr.checkpoint(HERE["drops"]), x), expected)
    assert_same(torch.get_rng_state(), state)


def test_what_looks_at_a_function_answers_too():
    x = torch.randn(2, 3, requires_grad=True)
    for mask in (SOME, ONES):
        found = [row.source for row in tr.saved_residuals(HERE["skips"], x, mask)]
        assert ("from the argument mask" in found) is (mask is SOME)
    wrapped = tr.checkpoint(HERE["skips"])
    assert tr.estimate(wrapped, x, SOME).peak_bytes > 0
    assert tr.plan(HERE["skips"], x, SOME, budget="100%").peak_bytes > 0


def test_under_transformations_of_functions():
    skips = tr.checkpoint(HERE["skips"])
    x = torch.randn(2, 3)
    for mask in (SOME, ONES):
        plain = lambda x, mask=mask: HERE["skips"](x, mask).square().sum()  # noqa: E731
        found = torch.func.hessian(lambda x, mask=mask: skips(x, mask).square().sum())(x)
        assert_same(found, torch.func.hessian(plain)(x), close=True)


REFUSED = [
    "drops_some",
    "asks_for_a_sum",
    "asks_for_signs",
    "asks_for_a_number",
    "asks_a_weight",
    "asks_long",
    "writes_through_a_view",
]


@pytest.mark.parametrize("name", [*REFUSED, "writes_to_the_argument"])
def test_what_has_no_answer_is_an_error_as_before(name):
    rest = () if name == "drops_some" else (torch.ones(2, 3, requires_grad="weight" in name),)
    before = [t.clone() for t in rest]
    with pytest.raises(ConcretizationError, match=r"masks\.py:\d+"):
        tr.checkpoint(HERE[name])(torch.randn(2, 3, requires_grad=True), *rest)
    assert_same(list(rest), before)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_a_mask_may_be_of_any_dtype(dtype):
    checkpointed = tr.checkpoint(HERE["skips_by_item"])
    x = torch.randn(2, 3)
    for mask in (SOME, ONES, SOME):
        assert_same(checkpointed(x, mask.to(dtype)), HERE["skips_by_item"](x, mask.to(dtype)))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("doubles", torch.tensor(False))

    def forward(self, x, mask):
        y = self.linear(x)
        if self.doubles:
            y = y * 2
        return y if mask.all() else y.masked_fill(mask == 0, 0.0)


def test_a_module_of_a_user():
    plain = Masked()
    wrapped = tr.nn.wrap(copy.deepcopy(plain))
    for step, mask in enumerate((SOME, ONES, SOME, ONES)):
        for model in (plain, wrapped):
            model.doubles.fill_(step > 1)
        x = torch.randn(2, 3)
        grads = [
            torch.autograd.grad(model(x, mask).square().sum(), tuple(model.parameters()))
            for model in (plain, wrapped)
        ]
        assert_same(*grads)


def test_very_many_answers_are_warned_of():
    @tr.checkpoint
    def counted(x, n):
        for i in range(20):
            if n == i:
                break
            x = x.sin()
        return x

    x = torch.randn(3, requires_grad=True)
    with pytest.warns(RetraceWarning, match="truth values of masks"):
        for n in range(10):
            counted(x, torch.tensor(n))


@pytest.mark.parametrize("given", ["meta", "mapped over"])
def test_an_argument_without_a_value_is_told_apart(given):
    skips = tr.checkpoint(HERE["skips"])
    with pytest.raises(ConcretizationError, match="Give it as a plain tensor"):
        if given == "meta":
            tr.estimate(skips, torch.ones(2, 3, device="meta", requires_grad=True), SOME.to("meta"))
        else:
            torch.vmap(skips)(torch.randn(2, 3), SOME)


def masked_or_doubled(x, mask):
    return x.sin() * 2 if mask.all() else x.sin() * mask


def fills_rows(x, lengths, tokens):
    inside = torch.arange(tokens.shape[1]) < lengths[:, None]
    return x.sin() * 2 if inside.all() else x.sin() * inside


def fills_rows_of_values(x, lengths, _):
    inside = torch.arange(x.shape[1]) < lengths[:, None]
    return x.sin() * 2 if inside.all() else x.sin() * inside


def gradient_of(fun, x, *args):
    x = x.clone().requires_grad_()
    y = fun(x, *args)
    return y, torch.autograd.grad(y.square().sum(), x)


def test_lengths_that_vary_have_their_own_answers():
    fun = tr.checkpoint(masked_or_doubled)
    for length in (4, 6, 5, 9, 3):
        ones = torch.ones(2, length, dtype=torch.long)
        for mask in (ones, ones.tril()):
            x = torch.randn(2, length)
            assert_same(gradient_of(fun, x, mask), gradient_of(masked_or_doubled, x, mask))
    assert len(fun._trace_cache.traces) <= 4  # for each answer one of the first size, one of all


@pytest.mark.parametrize("plain", [fills_rows, fills_rows_of_values])
def test_a_mask_that_is_made_of_a_length(plain):
    fun = tr.checkpoint(plain)
    for length in (4, 6, 5, 9, 3):
        for lengths in (torch.tensor([length, length]), torch.tensor([length, 2])):
            args = torch.randn(2, length), lengths, torch.ones(2, length, dtype=torch.long)
            assert_same(gradient_of(fun, *args), gradient_of(plain, *args))
    assert len(fun._trace_cache.traces) <= 4


def looks_whether_it_is_traced(x, mask):
    if isinstance(mask, torch._subclasses.FakeTensor) or not mask.all():
        return x.sin() * mask
    return x.sin() * 2


def test_libraries_find_no_fake_tensor_where_masks_have_values():
    """They go the way of a trace else, which costs a mask, and other kernels."""
    fun, x = tr.checkpoint(looks_whether_it_is_traced), torch.randn(2, 3)
    for mask in (SOME, ONES):
        assert_same(gradient_of(fun, x, mask), gradient_of(looks_whether_it_is_traced, x, mask))


def test_libraries_find_fake_tensors_where_a_mask_has_no_value():
    x, mask = torch.randn(2, 3, device="meta", requires_grad=True), ONES.to("meta")
    for policy in ("none", None):
        report = tr.explain(looks_whether_it_is_traced, x, mask, policy=policy)
        assert [row.name for row in report] == ["x", "mask"]
    assert [r.name for r in tr.explain(looks_whether_it_is_traced, x, ONES)] == ["x"]
