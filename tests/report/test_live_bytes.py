"""Bytes counted, against programs whose bytes can be worked out by hand."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchremat as tr
from torchremat.measure import HeldBytes, HeldTensor, LiveBytes
from torchremat.report.live_bytes import storages_in

pytestmark = pytest.mark.usefixtures("no_collector")

KB = 1024  # bytes of a float32 tensor of 256


@pytest.fixture
def x():
    return torch.ones(256)


class TestLiveBytes:
    def test_counts_new_storages_until_they_die(self, x):
        with LiveBytes() as memory:
            y = x + 1
            assert (memory.live, memory.peak) == (KB, KB)
            z = y * 2
            assert (memory.live, memory.peak) == (2 * KB, 2 * KB)
            del y
            assert (memory.live, memory.peak) == (KB, 2 * KB)
            z.add_(1)
            assert (memory.live, memory.peak) == (KB, 2 * KB)
        del z
        assert (memory.live, memory.peak) == (0, 2 * KB)

    def test_view_keeps_its_whole_base(self, x):
        with LiveBytes() as memory:
            y = (x + 1)[:1]
            assert memory.live == KB
            y = y.clone()
            assert memory.live == 4

    def test_older_storages_do_not_count(self, x):
        w = torch.ones(16, 16, requires_grad=True)
        with LiveBytes() as memory:
            held = [x.view(16, 16).t(), x.detach(), w.t(), x.reshape(2, 128), x.add_(1)]
            assert memory.live == 0
        assert len(held) == 5

    def test_older_storages_count_once_added(self, x):
        memory = LiveBytes()
        memory.add({"x": x, "again": [x[2:], x.view(16, 16)]}, "no tensor", None)
        assert (memory.live, memory.peak) == (KB, KB)
        with memory:
            y = x.view(16, 16) + 1
            assert (memory.live, memory.peak) == (2 * KB, 2 * KB)
            del x  # the fixture still has it
            assert memory.live == 2 * KB
        del y
        assert memory.live == KB

    def test_module_stands_for_its_state(self):
        memory = LiveBytes()
        memory.add(torch.nn.BatchNorm1d(256))
        # the module is gone; weight, bias, mean and variance, and the int64 count of batches
        assert (memory.live, memory.peak) == (0, 4 * KB + 8)

    def test_tied_parameters_count_once(self):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 16))
        model[1].weight = model[0].weight
        memory = LiveBytes()
        memory.add(model)
        assert memory.live == KB + 64

    @pytest.mark.parametrize(
        ("make", "nbytes"),
        [
            (lambda: torch.tensor([1.0, 2.0, 3.0]), 12),
            (lambda: torch.zeros(3, dtype=torch.float64), 24),
            (lambda: torch.rand(5, dtype=torch.bfloat16), 10),
            (lambda: torch.arange(4), 32),
            (lambda: torch.empty(0), 0),
            (lambda: torch.nn.Parameter(torch.empty(3, 2)), 24),
            (lambda: torch.ones(3).expand(7, 3), 12),
            (lambda: torch.ones(4, 3).split(2), 48),
            # 3 values of 4 bytes, 2 x 3 indices of 8
            (lambda: torch.eye(3).to_sparse(), 12 + 48),
            # crow has 4 entries; col is a view into 2 x 3 indices
            (lambda: torch.eye(3).to_sparse_csr(), 12 + 32 + 48),
            (lambda: torch.empty(100, device="meta"), 0),
        ],
    )
    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
    def test_factories(self, make, nbytes):
        with LiveBytes() as memory:
            made = make()
            assert memory.live == nbytes
            del made
            assert memory.live == 0

    def test_resize(self):
        with LiveBytes() as memory:
            y = torch.empty(10)
            y.resize_(100)
            assert (memory.live, memory.peak) == (400, 400)
            y.untyped_storage().resize_(0)
            y.detach_()
            assert memory.live == 400
            y.detach()
            assert memory.live == 0
            torch.add(torch.ones(5), 1, out=(z := torch.empty(0)))
            assert memory.live == 20
        del y, z
        assert memory.live == 0

    def test_autograd_keeps_and_frees(self, x):
        """sin and exp each save one value; only C++ knows of it in the meantime.

        exp: y = exp(x)    saves y    dx = dy * y
        sin: z = sin(y)    saves y    dy = dz * cos(y)
        sum: saves nothing
        """
        x.requires_grad_()
        with LiveBytes() as memory:
            loss = x.exp().sin().sum()
            assert memory.live == KB + 4  # y, loss
            assert memory.peak == 2 * KB + 4  # y, z, loss
            memory.reset_peak()
            assert memory.peak == KB + 4
            loss.backward()
            # y, loss; cos(y), dy and 4 bytes that dz is expanded from
            assert memory.peak == 3 * KB + 8
            assert memory.live == KB + 4  # x.grad, loss
            x.grad = None
            assert memory.live == 4
        del loss
        assert memory.live == 0

    def test_gradients_are_not_copied_because_we_look(self):
        w = torch.ones(16, 16, requires_grad=True)
        a = torch.ones(16, 16)
        for _ in range(3):
            w.grad = None
            with LiveBytes() as memory:
                (a @ w).sum().backward()
            # a @ w is dead: the loss and the number that dy is expanded from, mm's copy and dw
            assert (memory.live, memory.peak) == (KB, KB + 8)

    def test_a_step_leaves_what_it_should(self):
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters())
        num_bytes = 4 * (KB + 64)
        memory = LiveBytes()
        memory.add(model)
        with memory:
            model(torch.ones(2, 16)).sum().backward()
            assert memory.live == 2 * num_bytes
            optimizer.step()
            assert memory.live == 4 * num_bytes + 8 * 4  # and a step number a parameter
            optimizer.zero_grad()
            assert memory.live == 3 * num_bytes + 8 * 4
        del model, optimizer
        gc.collect()
        assert memory.live == 0

    def test_user_function_and_its_context(self, x):
        class Keep(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.twice = x * 2
                return x + 1

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.twice

        x.requires_grad_()
        with LiveBytes() as memory:
            y = Keep.apply(x)
            assert memory.live == 2 * KB
            del y
            assert memory.live == 0

    def test_checkpoint_frees_and_recomputes(self, x):
        x.requires_grad_()

        def f(x):
            return x.exp().exp().exp()

        with LiveBytes() as memory:
            loss = f(x).sum()
            assert memory.live == 3 * KB + 4
            del loss
            loss = checkpoint(f, x, use_reentrant=False).sum()
            assert memory.live == 4
            loss.backward()
            assert memory.live == KB + 4

    def test_inside_cond(self, x):
        def big(x):
            return (x.repeat(10) + 1).sum()

        def small(x):
            return x.sum()

        with LiveBytes() as memory:
            y = torch.cond(torch.tensor(True), big, small, (x,))
            # the predicate of one byte, and the two values of ten times x
            assert (memory.live, memory.peak) == (4, 20 * KB + 1)
        assert y == 20 * 256
        plain = torch.ones(3, requires_grad=True)
        torch.cond(torch.tensor(True), torch.sin, torch.cos, (plain,)).sum().backward()
        assert torch.equal(plain.grad, torch.ones(3).cos())  # Dynamo compiles it as ever
        tr.make_graph(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(torch.ones(4))

    def test_under_vmap_and_grad(self, x):
        x = x.view(4, 64)
        with LiveBytes() as memory:
            y = torch.vmap(torch.sin)(x)
            assert memory.live == KB
            y = torch.func.grad(lambda x: x.sin().sum())(x)
            assert memory.live == KB
        assert torch.equal(y, x.cos())

    def test_nested(self, x):
        with LiveBytes() as outer:
            y = x + 1
            with LiveBytes() as inner:
                z = x + 2
            assert (outer.live, inner.live) == (2 * KB, KB)
        del y, z
        assert (outer.live, inner.live) == (0, 0)

    def test_ends_with_the_block_also_on_error(self, x):
        memory = LiveBytes()
        with pytest.raises(ZeroDivisionError), memory:
            y = x + 1
            z = 1 / 0
        z = x + 2
        assert memory.live == KB
        with memory:
            z = x + 3
        assert (memory.live, memory.peak) == (2 * KB, 2 * KB)
        del y, z

    def test_keeps_nothing_alive(self, x):
        with LiveBytes() as memory:
            y = x + 1
        storage = weakref.ref(y.untyped_storage())
        del y
        assert storage() is None
        gone = weakref.ref(memory)
        del memory
        assert gone() is None
        x.add_(1)

    def test_equals_the_allocator(self):
        """Live and peak bytes of a training step, against each allocation in the profiler's log."""
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        x = torch.randn(4, 8, 32)

        def step():
            model.zero_grad()
            model(x).square().sum().backward()

        step()
        model.zero_grad()
        with LiveBytes() as memory:
            step()
        counted = (memory.live, memory.peak)
        model.zero_grad()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(
            activities=activities, profile_memory=True, acc_events=True
        ) as profile:
            step()
        events = profile.profiler.kineto_results.events()
        memory_events = [event for event in events if event.name() == "[memory]"]
        live = peak = 0
        for event in sorted(memory_events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        assert counted == (live, peak)


class TestHeldBytes:
    def test_what_autograd_saves(self, x):
        w = torch.ones(16, 16, requires_grad=True)
        a = x.view(16, 16)
        with HeldBytes(w, a) as held:
            loss = (a @ w).exp().tanh().sum()
        expected = HeldTensor((16, 16), torch.float32, KB)
        assert held.tensors == [expected, expected]  # the results of exp and tanh
        assert held.total == 2 * KB
        loss.backward()
        assert held.total == 2 * KB

    def test_counts_storages_once(self, x):
        x.requires_grad_()
        with HeldBytes() as held:
            y = x.exp()
            loss = (y * y).sum() + y[:3].square().sum() + y.view(16, 16).t().sin().sum()
        assert [tensor.shape for tensor in held.tensors] == [(256,)]
        assert held.total == KB
        del loss

    def test_a_saved_view_holds_its_base(self, x):
        x.requires_grad_()
        with HeldBytes(x) as held:
            loss = (x + 1)[:2].square().sum()
        assert held.tensors == [HeldTensor((2,), torch.float32, KB)]
        del loss

    def test_parameters_and_inputs_apart(self):
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
        )
        x = torch.ones(4, 16)
        with HeldBytes() as everything:
            model(x).sum()
            loss = model(x).sum()
        with HeldBytes(model) as without_model:
            loss = model(x).sum()
        with HeldBytes([model, {"x": x}]) as apart:
            loss = model(x).sum()
        num_hidden = 4 * 32 * 4  # the inputs of gelu and of the second layer
        assert apart.total == 2 * num_hidden
        assert without_model.total == 2 * num_hidden + 4 * 16 * 4
        assert everything.total == 2 * num_hidden + 4 * 16 * 4 + 8 * 32 * 4
        loss.backward()

    def test_released_graphs_do_not_count(self, x):
        x.requires_grad_()
        with HeldBytes() as held:
            y = x.exp().sum()
            assert held.total == KB
            z = x.tanh().sum()
            assert held.total == 2 * KB
            y.backward()
            assert held.total == KB
            del z
            assert held.total == 0
        assert held.tensors == []

    def test_retain_graph(self, x):
        x.requires_grad_()
        with HeldBytes() as held:
            y = x.exp().sum()
            y.backward(retain_graph=True)
            assert held.total == KB
            y.backward()
            assert held.total == 0

    def test_total_is_of_the_end_of_the_block(self, x):
        x.requires_grad_()
        held = HeldBytes()
        assert (held.total, held.tensors) == (0, [])
        with held:
            y = x.exp()
        del y
        assert held.total == KB
        with held:
            assert held.total == 0
        assert held.total == 0

    def test_checkpoint_holds_its_input(self, x):
        x.requires_grad_()

        def f(x):
            return x.exp().exp().exp()

        with HeldBytes() as held:
            y = x * 2
            loss = checkpoint(f, y, use_reentrant=False).sum()
        assert held.total == KB
        with HeldBytes() as plain:
            y = x * 2
            loss = f(y).sum()
        assert plain.total == 3 * KB
        del loss

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_training_is_unaffected(self, dtype):
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True).to(dtype)
        x = torch.randn(2, 5, 16, dtype=dtype)
        results = []
        for context in (HeldBytes(), HeldBytes(model, x), None):
            torch.manual_seed(1)
            if context is None:
                loss = model(x).square().mean()
            else:
                with context:
                    loss = model(x).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), model.linear1.weight)
            results.append((loss, *grads, *second))
        for result in results[:2]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[2], strict=True))

    @pytest.mark.parametrize("change", ["result", "leaf"])
    def test_changed_in_place_still_raises(self, x, change):
        w = torch.ones(256, requires_grad=True)
        with HeldBytes():
            y = w.exp()
            loss = (x * y).sum()
        with torch.no_grad():
            {"result": y, "leaf": x}[change].add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1"):
            loss.backward()

    def test_excluded_storages_are_not_kept(self, x):
        x.requires_grad_()
        y = x * 2
        held = HeldBytes(y)
        gone = weakref.ref(y.untyped_storage())
        del y
        assert gone() is None
        # whatever takes the place of the dead storage counts
        with held:
            z = x.exp()
        assert held.total == KB
        del z

    def test_keeps_nothing_alive(self, x):
        x.requires_grad_()
        with HeldBytes() as held:
            z = x.exp()
            y = z.sum()
        gone = weakref.ref(z.untyped_storage())
        del z
        assert gone() is not None
        del y
        assert gone() is None
        assert held.total == KB

    def test_hooks_end_with_the_block_also_on_error(self, x):
        x.requires_grad_()
        held = HeldBytes()
        with pytest.raises(ZeroDivisionError), held:
            y = x.exp()
            y / (1 // 0)
        z = x.tanh()
        assert held.total == KB
        del z

    def test_agrees_with_the_live_bytes_at_the_end_of_the_forward(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(3)]
        )
        x = torch.randn(4, 16)
        with LiveBytes() as memory, HeldBytes(model, x) as held:
            loss = model(x).square().sum()
        # beside what autograd holds there is the loss itself
        assert memory.live == held.total + 4
        loss.backward()


def test_storages_of_a_wrapper_subclass():
    values = torch.ones(5, 2)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 5]))
    assert sorted(storage.nbytes() for storage in storages_in(nested)) == [24, 40]


def test_storage_that_cannot_be_seen():
    with pytest.raises(NotImplementedError, match="Cannot access storage"):
        LiveBytes().add(torch.ones(3).to_mkldnn())
