"""What a policy offloads is in the host's memory between the passes, and changes no number.

On the CPU the pool is memory of its own: bytes on the device and on the host are told apart.
"""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import torchremat as tr
from tests.helpers import assert_same, in_threads
from tests.remat.offload.programs import DOTS, chain, gpt, grads, layers, names, train, u_net
from torchremat import config
from torchremat.checkpoint_policies import (
    nothing_saveable,
    save_only_these_names,
)
from torchremat.errors import OffloadWarning
from torchremat.measure import HeldBytes, LiveBytes, host_stats
from torchremat.planning.step.traced_step import timeline_of
from torchremat.remat.offload import copies, host_pool

pytestmark = pytest.mark.usefixtures("empty_pool")


@pytest.mark.parametrize("policy", [DOTS, names("attn", "mlp", "skip", "deep")], ids=repr)
@pytest.mark.parametrize("select", [None, "layers.*"])
@pytest.mark.parametrize("build", [gpt, u_net])
@pytest.mark.filterwarnings("ignore::torchremat.errors.UnmatchedWarning")
def test_training_is_the_same_to_the_bit(build, policy, select):
    if select and build is u_net:
        pytest.skip("it has no list of layers")
    model, x = build()
    wrapped = tr.nn.wrap(copy.deepcopy(model), policy, select=select)
    with torch.random.fork_rng():
        expected = train(model, x)
    assert_same(train(wrapped, x), expected)
    counts = host_stats()
    assert counts.num_copied == counts.num_fetched > 0
    assert counts.nbytes == counts.num_refused == 0


# --- bytes ---------------------------------------------------------------------------------------


def test_between_the_passes_the_device_holds_nothing_and_the_host_all():
    inputs = chain()
    f = tr.checkpoint(layers, policy=DOTS)
    f(*inputs)
    gc.collect()
    with LiveBytes() as live, HeldBytes(*inputs) as held:
        loss = f(*inputs)
    assert held.total == 0
    assert live.live == loss.nbytes
    assert host_stats().nbytes == 3 * 8 * 8 * 4
    del loss
    assert host_stats().nbytes == 0


def test_a_backward_pass_gives_the_memory_back_value_by_value():
    inputs = chain()
    loss = tr.checkpoint(layers, policy=DOTS)(*inputs)
    seen = []
    inputs[3].register_hook(lambda g: seen.append(host_stats().nbytes))
    loss.backward()
    assert host_stats().nbytes == 0
    assert host_stats().num_fetched == 3


@pytest.mark.parametrize("prefetch", [1, 2, 8])
@pytest.mark.parametrize("policy", [DOTS, DOTS | save_only_these_names("attn")], ids=repr)
@pytest.mark.filterwarnings("ignore::torchremat.errors.UnmatchedWarning")
def test_what_is_simulated_is_what_is_measured(policy, prefetch, monkeypatch):
    monkeypatch.setattr(config, "offload_prefetch", prefetch)
    inputs = chain(5, 16)
    f = tr.checkpoint(lambda *args: layers(*args), policy=policy)
    f(*inputs).backward()
    timeline = timeline_of(f.last_program)
    for w in inputs[1:]:
        w.grad = None
    with LiveBytes() as memory:
        loss = f(*inputs)
        host_nbytes = host_stats().nbytes
        held, forward = memory.live - loss.nbytes, memory.peak
        memory.reset_peak()
        loss.backward()
    peaks = [
        max(point.live for point in timeline if point.phase == phase)
        for phase in ("forward", "backward")
    ]
    assert (peaks, timeline.saved_bytes) == ([forward, memory.peak], held)
    assert timeline.offloaded_bytes == host_nbytes == 5 * 16 * 16 * 4


def test_a_value_comes_back_as_many_operators_ahead_as_is_said(monkeypatch):
    ahead = []
    for lead in (1, 3):
        monkeypatch.setattr(config, "offload_prefetch", lead)
        f = tr.checkpoint(lambda *args: layers(*args), policy=DOTS)
        f(*chain(4)).backward()
        program = f.last_program
        needed = tuple(spec.requires_grad for spec in program.region.specs)
        module = program.backward((True,), needed, with_states=True).module
        nodes = [n for n in module.graph.nodes if n.op == "call_function"]
        starts = [i for i, n in enumerate(nodes) if n.target is copies.start_fetch]
        ends = [i for i, n in enumerate(nodes) if n.target is copies.finish_fetch]
        needs_cotangents = [n.name.partition("_")[0] in ("mm", "mul") for n in nodes]
        pairs = zip(starts, ends, strict=True)
        ahead.append([sum(needs_cotangents[start:end]) for start, end in pairs])
    assert ahead == [[0, 1, 1, 1], [0, 1, 3, 3]]  # few run before the first two are read


# --- layouts -------------------------------------------------------------------------------------

BASE = torch.arange(24.0).reshape(4, 6)
LAYOUTS = {
    "contiguous": BASE,
    "transposed": BASE.t(),
    "strided": BASE[:, ::2],
    "offset": BASE[2:, 3:],
    "expanded": BASE[:1].expand(5, 6),
    "overlapping": BASE.as_strided((3, 4), (2, 1), 1),
    "0-d": torch.tensor(3.0),
    "0-d offset": BASE[2, 3],
    "empty": torch.empty(0, 3),
    "bool": BASE > 7,
    "bfloat16": BASE.bfloat16().t(),
    "int8": BASE.to(torch.int8),
    "complex": torch.complex(BASE, -BASE).t(),
    "conjugate": torch.complex(BASE, -BASE).conj(),
    "negative": torch.complex(BASE, -BASE).conj().imag,
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("value", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_comes_back_as_it_was(value):
    expected = value.clone() if value.is_neg() else value  # nothing that is kept is a view
    kept = copies.to_host(value)
    assert host_pool.holds(kept.untyped_storage())
    assert kept.data_ptr() != value.data_ptr() or not value.numel()
    back = copies.fetch_value(kept, value.device)
    assert not host_pool.holds(back.untyped_storage())
    assert_same(back, value)
    assert (back.stride(), back.storage_offset()) == (expected.stride(), expected.storage_offset())


def test_values_in_one_storage_share_the_copy():
    kept = copies.to_host(BASE)
    other = copies.to_host(BASE.t()[1:], kept)
    assert host_stats().nbytes == BASE.nbytes
    assert host_stats().num_copied == 1
    fetch = copies.start_fetch(kept, BASE.device)
    a, b = copies.finish_fetch(fetch), copies.finish_fetch(fetch, other)
    assert_same((a, b), (BASE, BASE.t()[1:]))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    del kept, fetch
    assert host_stats().nbytes == BASE.nbytes  # `other` has it
    del other
    assert host_stats().nbytes == 0


def test_residuals_in_one_storage_are_one_copy():
    @tr.checkpoint
    def inner(x, w):
        y = (x @ w).sin()
        return y, y.t(), y.exp()

    def outer(x, w):
        y, t, s = inner(x, w)
        return (y.cos() * t.tan().t() * s).sum()

    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    f = tr.checkpoint(outer, policy=offload_all)
    loss = f(x, w)
    num_copies = len(f.last_program.offloaded) - 1
    assert host_stats().num_copied == num_copies
    assert host_stats().nbytes == num_copies * w.nbytes
    assert_same(torch.autograd.grad(loss, w), torch.autograd.grad(outer(x, w), w))
    assert host_stats().num_fetched == num_copies


def offload_all(op, *avals, **params):
    return tr.Offloadable("device", "pinned_host")


@pytest.mark.parametrize("outer_policy", ["none", "full", offload_all])
def test_a_checkpoint_that_offloads_is_traced_within_another(outer_policy):
    inputs = chain()
    inner = tr.checkpoint(layers, policy=offload_all)
    outer = tr.checkpoint(lambda *args: inner(*args).exp(), policy=outer_policy)
    found = outer(*inputs)
    assert not outer.last_program.region.body.captured()
    expected = grads(lambda *args: layers(*args).exp(), inputs)
    assert_same(torch.autograd.grad(found, inputs[1:]), expected)


# --- what stays ----------------------------------------------------------------------------------


def test_an_output_stays_and_is_caught_when_it_is_changed():
    def product(x, w):
        y = torch.exp(x @ w)
        tr.checkpoint_name(y, "out")
        return y

    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    f = tr.checkpoint(product, policy=names("out"))
    y = f(x, w)
    assert host_stats().nbytes == 0
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    (row,) = (row for row in tr.explain(f, x, w) if row.name == "out")
    assert row.decision == "saved"
    assert "it is an output, which the caller holds" in row.reason
    f(x, w).sum().backward()


def test_a_policy_that_offloads_is_honoured_at_any_size():
    x, w, v = torch.randn(10, 10), torch.randn(10, 10, requires_grad=True), torch.randn(10, 7)
    report = tr.explain(lambda x, w, v: ((x @ w).sin() @ v).sin().sum(), x, w, v, policy=DOTS)
    rows = {row.shape: row for row in report if row.op == "mm"}
    assert rows[10, 10].decision == rows[10, 7].decision == "offloaded"
    assert (report.total, report.offloaded_total) == (0, 680)


def test_a_report_prints_all_of_the_reason_why_a_value_stays():
    def f(x, w):
        y = x @ w
        return y, y.sin()

    report = tr.explain(f, *torch.randn(2, 9, 9), policy=DOTS)
    text = " ".join(str(report).split())
    assert "offloads it, but it stays, since it is an output, which the caller holds" in text


def test_inputs_parameters_and_their_views_are_never_moved():
    linear = nn.Linear(4, 4)

    @tr.checkpoint
    def inner(x):
        return x.t(), linear(x)

    def f(x):
        t, y = inner(tr.checkpoint_name(x, "x"))
        return (t[1:].sin().sum() + y.sin()).sum()

    x = torch.randn(4, 4, requires_grad=True)
    wrapped = tr.checkpoint(f, policy=offload_all)
    with HeldBytes(linear, x) as held:
        loss = wrapped(x)
    assert host_stats().nbytes == tr.explain(wrapped, x).offloaded_total > 0
    assert held.total == 0
    for row in tr.explain(wrapped, x):
        if not row.op:
            assert row.decision in ("input", "parameter")
        elif row.op == "t":
            assert "it lies in the memory of an input" in row.reason
    assert_same(torch.autograd.grad(loss, x), torch.autograd.grad(f(x), x))


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (tr.Offloadable("device", torch.device("cuda:0")), "not to 'cuda:0'"),
        (tr.Offloadable("pinned_host", "device"), "not to 'device'"),
        (tr.Offloadable(torch.device("cuda"), "pinned_host"), "it is on 'cpu', and the policy"),
    ],
)
def test_places_that_cannot_be_are_told(verdict, reason):
    f = tr.checkpoint(layers, policy=lambda op, *avals, **params: verdict)
    inputs = chain(1)
    with pytest.warns(OffloadWarning, match=reason):
        loss = f(*inputs)
    loss.backward()
    assert host_stats().num_copied == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)  # a trace of its own, on fake tensors
        report = tr.explain(f, *inputs)
    assert report.offloaded_total == 0
    assert any(reason in row.reason for row in report)


def test_a_full_pool_warns_once_and_nothing_is_wrong(monkeypatch):
    monkeypatch.setattr(config, "host_pool_nbytes", 2 * 8 * 8 * 4)
    inputs = chain(5)
    f = tr.checkpoint(layers, policy=DOTS)
    with pytest.warns(OffloadWarning, match="Raise config.host_pool_nbytes") as seen:
        loss = f(*inputs)
    assert len(seen) == 1
    assert host_stats().nbytes == 2 * 8 * 8 * 4
    assert host_stats().num_refused == 3
    expected = torch.autograd.grad(layers(*inputs), inputs[1:])
    assert_same(torch.autograd.grad(loss, inputs[1:]), expected)
    assert_same(torch.autograd.grad(f(*inputs), inputs[1:]), expected)  # without a warning


# --- autograd ------------------------------------------------------------------------------------


def test_hooks_see_what_autograd_is_given():
    inputs = chain()
    seen = []
    f = tr.checkpoint(layers, policy=DOTS)
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        loss = f(*inputs)
    assert sum(host_pool.holds(t.untyped_storage()) for t in seen) == 3
    assert_same(torch.autograd.grad(loss, inputs[1:]), grads(layers, inputs))


@pytest.mark.parametrize(
    "hooks",
    [
        lambda: save_on_cpu(),
        lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
        lambda: saved_tensors_hooks(lambda t: t.t().clone().t(), lambda t: t),
        lambda: saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy),
    ],
    ids=["save_on_cpu", "detached", "other strides", "numpy"],
)
def test_hooks_may_keep_it_otherwise(hooks):
    inputs = chain()
    f = tr.checkpoint(layers, policy=DOTS)
    with hooks():
        loss = f(*inputs)
    others = [f(*inputs) for _ in range(2)]  # would be written where the first was, if it were free
    assert_same(torch.autograd.grad(loss, inputs[1:]), grads(layers, inputs))
    del others


def test_checkpoints_of_pytorch_around():
    inputs = chain()
    f = tr.checkpoint(layers, policy=DOTS)
    loss = torch.utils.checkpoint.checkpoint(f, *inputs, use_reentrant=False)
    assert host_stats().nbytes == 0
    assert_same(torch.autograd.grad(loss, inputs[1:]), grads(layers, inputs))


def test_a_graph_that_is_retained_can_be_gone_through_again():
    inputs = chain()
    loss = tr.checkpoint(layers, policy=DOTS)(*inputs)
    first = torch.autograd.grad(loss, inputs[1:], retain_graph=True)
    held = host_stats().nbytes
    second = torch.autograd.grad(loss, inputs[1:])
    assert held > 0 == host_stats().nbytes
    assert_same(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_derivatives():
    inputs = chain()

    def second(fun):
        first = torch.autograd.grad(fun(*inputs), inputs[1:], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs[1:])

    found = second(tr.checkpoint(layers, policy=DOTS))
    assert_same(found, second(tr.checkpoint(layers, policy="dots")))
    assert host_stats().num_fetched > 0
    torch.autograd.gradcheck(
        tr.checkpoint(layers, policy=DOTS), [t.double().requires_grad_() for t in chain()]
    )


def test_under_torch_func_values_stay_on_the_device():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    f = tr.checkpoint(lambda w: (x @ w).sin().sum(), policy=DOTS)
    assert_same(torch.func.grad(f)(w), torch.func.grad(f.fun)(w))
    assert_same(torch.vmap(f)(w[None]), torch.vmap(f.fun)(w[None]))
    assert host_stats().num_copied == 0
    report = tr.explain(torch.func.grad(f), w.requires_grad_())
    assert report.offloaded_total == 0


def test_within_another_checkpoint_the_outer_policy_decides():
    inputs = chain()
    inner = tr.checkpoint(layers, policy=DOTS)
    outer = tr.checkpoint(lambda *args: inner(*args).exp(), policy=nothing_saveable)
    found = outer(*inputs)
    assert host_stats().num_copied == 0
    expected = grads(lambda *args: layers(*args).exp(), inputs)
    assert_same(torch.autograd.grad(found, inputs[1:]), expected)
    inner = tr.checkpoint(layers, policy=nothing_saveable)
    outer = tr.checkpoint(lambda *args: inner(*args).exp(), policy=DOTS)
    found = outer(*inputs)
    assert host_stats().nbytes == 3 * 8 * 8 * 4
    assert_same(torch.autograd.grad(found, inputs[1:]), expected)
    assert tr.explain(outer, *inputs).offloaded_total == 3 * 8 * 8 * 4


def test_without_gradients_nothing_is_copied():
    inputs = chain()
    f = tr.checkpoint(layers, policy=DOTS)
    with torch.no_grad():
        f(*inputs)
    f(*(t.detach() for t in inputs))
    with torch.inference_mode():
        f(*inputs)
    assert host_stats().num_copied == 0


def test_sizes_may_change():
    f = tr.checkpoint(layers, policy=DOTS)
    w = torch.randn(8, 8, requires_grad=True)
    for rows in (8, 5, 6, 7):
        x = torch.randn(rows, 8)
        loss = f(x, w, w)
        assert host_stats().nbytes == 2 * rows * 8 * 4
        assert_same(torch.autograd.grad(loss, w), torch.autograd.grad(layers(x, w, w), w))


def test_random_values_and_states_besides():
    def f(x, w):
        return F.dropout((x @ w).sin(), 0.5).square().sum()

    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    found = []
    for fun in (
        f,
        tr.checkpoint(f, policy=DOTS),
        tr.checkpoint(f, policy=offload_all),
    ):
        torch.manual_seed(3)
        loss = fun(x, w)
        found.append((loss.detach(), torch.autograd.grad(loss, w)))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_copies_and_pickles_of_modules():
    model, x = gpt()
    tr.nn.wrap(model.eval(), DOTS, select="layers.*")
    model(x).sum().backward()
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in others:
        other.zero_grad()
        other(x).sum().backward()
        assert_same([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])


def test_threads():
    inputs = chain(4, 16)
    f = tr.checkpoint(layers, policy=DOTS)
    expected = grads(layers, inputs)
    f(*inputs)

    def work():
        return [grads(f, inputs) for _ in range(10)]

    for found in in_threads(*[work] * 4):
        assert_same(found, [expected] * 10)
    assert host_stats().nbytes == 0


def test_dropping_a_graph_frees_the_memory():
    inputs = chain()
    loss = tr.checkpoint(layers, policy=DOTS)(*inputs)
    node = weakref.ref(loss.grad_fn)
    assert host_stats().nbytes > 0
    del loss
    assert node() is None
    assert host_stats().nbytes == 0


# --- reports -------------------------------------------------------------------------------------


def test_all_reports_have_the_same_numbers():
    inputs = chain()
    f = tr.checkpoint(layers, policy=DOTS)
    nbytes = 3 * 8 * 8 * 4
    report = tr.explain(f, *inputs)
    assert (report.total, report.offloaded_total) == (0, nbytes)
    assert report.by_decision()["offloaded"] == nbytes
    assert f"by the host: {nbytes} B in 3 tensors" in str(report)
    residuals = [r for r in tr.saved_residuals(f, *inputs) if r.node is not None]
    assert sum(r.nbytes for r in residuals) == nbytes
    assert all(r.source.endswith(" (offloaded to pinned_host)") for r in residuals)
    estimate = tr.estimate(layers, *inputs, policy=DOTS)
    assert (estimate.saved_bytes, estimate.offloaded_bytes) == (0, nbytes)
    assert "on the host" in str(estimate)


def test_the_report_of_a_module_has_what_the_pool_holds():
    model, x = gpt()
    tr.nn.wrap(model, names("mlp", saved=["attn"]), select="layers.*")
    loss = model(x).sum()
    report = tr.nn.report(model)
    assert report.offloaded_total == host_stats().nbytes > 0
    rows = [row for row in report if row.decision == "offloaded"]
    assert {row.name for row in rows} == {"mlp"}
    loss.backward()


def test_the_log_says_so(caplog, monkeypatch):
    monkeypatch.setattr(config, "log_checkpoint_residuals", True)
    tr.checkpoint(layers, policy=DOTS)(*chain(1))
    assert "(offloaded to pinned_host)" in caplog.text


# --- where nothing is offloaded ------------------------------------------------------------------


def test_a_verification_keeps_all_on_the_device(monkeypatch):
    monkeypatch.setattr(config, "verify_recomputation", "bitwise")
    inputs = chain()
    f = tr.checkpoint(layers, policy=DOTS)
    assert_same(grads(f, inputs), grads(layers, inputs))
    assert host_stats().num_copied == 0
    reasons = [row.reason for row in tr.explain(f, *inputs) if row.op == "mm"]
    assert len(reasons) == 3
    assert all("verify_recomputation keeps everything" in reason for reason in reasons)


def test_compiled_graphs_save_and_say_so():
    inputs = chain()
    expected = grads(layers, inputs)
    f = tr.jit(tr.checkpoint(layers, policy=DOTS), backend="eager")
    g = torch.compile(
        layers, backend="torchremat", options={"policy": DOTS, "codegen": "eager"}, fullgraph=True
    )
    h = torch.compile(tr.checkpoint(layers, policy=DOTS), backend="aot_eager")
    for fun in (f, g, h):
        with pytest.warns(OffloadWarning, match="saved on their device"):
            found = grads(fun, inputs)
        assert_same(found, expected)
    assert host_stats().num_copied == 0
