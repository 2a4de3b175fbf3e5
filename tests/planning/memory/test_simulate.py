"""The simulator says, to the byte, what a dispatch mode counts when the graphs run."""

import random
import runpy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import (
    aot_function,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor, fx, nn

import torchremat as tr
from tests.architectures import ARCHITECTURES
from tests.helpers import gradients_handed_on
from tests.programs import BUFFERS, DRAWS, WRITES, Program, inputs
from torchremat._torch import FREES_COTANGENTS
from torchremat.errors import GraphError
from torchremat.graph.codegen import compile_graph
from torchremat.graph.nodes import base_of, results_of
from torchremat.measure import LiveBytes
from torchremat.planning import Timeline, simulate

# --- models --------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(16, 48), nn.Linear(16, 16), fused

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(mask, -torch.inf)
            y = scores.softmax(-1) @ v
        return self.out(tr.checkpoint_name(y, "attn").transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fused: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = Attention(fused)
        self.mlp = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + tr.checkpoint_name(self.mlp(self.norm2(x)), "mlp")


class GPT(nn.Module):
    """Its head and its embedding share a weight; blocks may be checkpoints of their own."""

    def __init__(self, *, fused: bool = True, dropout: float = 0.0, inner: str | None = None):
        super().__init__()
        self.embed, self.position = nn.Embedding(32, 16), nn.Parameter(torch.randn(8, 16))
        self.blocks = nn.ModuleList(Block(fused, dropout) for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.inner = inner

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = (tr.checkpoint(block, policy=self.inner) if self.inner else block)(x)
        return self.head(x)


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.RMSNorm(16)

    def forward(self, x):
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (2, 8)).transpose(1, 2)
        k, v = (t.unsqueeze(1).expand_as(q) for t in self.kv(h).split(8, -1))
        turned = torch.cat([-q[..., 4:], q[..., :4]], -1)
        x = x + self.out(
            F.scaled_dot_product_attention(q + turned, k, v).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class ConvNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2, self.fc = norm(8), norm(8), nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)), inplace=True) + x
        return self.fc(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        skip = F.silu(self.down1(x))
        low = F.silu(self.down2(F.avg_pool2d(skip, 2)))
        return self.out(torch.cat([self.up(low), skip], 1))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels, self.norm = nn.Linear(8, 8), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        x = x + F.gelu(self.tokens(self.norm(x).mT)).mT
        return x + F.gelu(self.channels(self.norm(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.gru(x)[0])


class Branching(nn.Module):
    """The branch that is taken is the one that needs more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.a(x)
        with warnings.catch_warnings():  # Dynamo, which traces the branches, looks at y.grad
            warnings.simplefilter("ignore")
            y = torch.cond(y.sum() > -1e9, lambda y: y.sin().exp().cos(), lambda y: y.cos(), (y,))
        return self.b(y).tanh()


class Writing(nn.Module):
    """It writes to slices of what it makes, and to a buffer, of which it returns a part."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(16))

    def forward(self, x):
        y = self.fc(x)
        z = torch.zeros(4, 3, 16)
        z[:, 1] = y.sin()
        z[:, 2, :8].add_(y[:, :8])
        self.count.add_(y.detach().sum(0))
        return z[:, 1:].exp() * self.count.clone()


class Autocast(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*args)


def tokens() -> Tensor:
    return torch.randint(32, (2, 8))


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gpt": lambda: (GPT(), tokens()),
    "gpt, attention of operators": lambda: (GPT(fused=False), tokens()),
    "gpt, dropout": lambda: (GPT(dropout=0.2), tokens()),
    "gpt, nested": lambda: (GPT(inner="dots", dropout=0.2), tokens()),
    "gpt, autocast": lambda: (Autocast(GPT()), tokens()),
    "llama": lambda: (LlamaLayer(), torch.randn(2, 8, 16)),
    "resnet": lambda: (ConvNet(nn.BatchNorm2d), images()),
    "resnet, autocast": lambda: (Autocast(ConvNet(nn.BatchNorm2d)), images()),
    "groupnorm": lambda: (ConvNet(lambda c: nn.GroupNorm(2, c)), images()),
    "unet": lambda: (UNet(), images()),
    "mixer": lambda: (Mixer(), torch.randn(2, 8, 16)),
    "gru": lambda: (Recurrent(), torch.randn(2, 3, 8)),
    "cond": lambda: (Branching(), torch.randn(4, 16)),
    "writes": lambda: (Writing(), torch.randn(4, 16)),
}


def coin(seed: int) -> Callable[..., bool]:
    """A policy that decides by chance, the same each time."""
    return lambda op, *avals, **params: random.Random(f"{seed} {op} {avals}").random() < 0.5


POLICIES = {
    "none": "none",
    "full": "full",
    "chance": coin(0),
    "dots": "dots",
    "dots without batch": "dots_with_no_batch_dims_saveable",
    "names": "names:attn,mlp",
    "but names": "save_anything_except_these_names:attn",
    "modules": "modules:blocks.0",
    "operators": "ops:aten.mm,aten.addmm,aten.convolution,aten.gelu",
    "recomputed operators": "recompute_ops:aten.mm,aten.native_layer_norm",
    "another chance": coin(1),
}
QUICK = ("full", "chance")


# --- what runs, and what is simulated ------------------------------------------------------------


class Noted(LiveBytes):
    """Notes the bytes alive after each operator that makes something, apart from writes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is not torch.ops.aten.copy_.default and func.namespace == "aten":
            self.counts.append(self.live)
        return out


def figures(timeline: Timeline) -> list[int]:
    """Peak and what is left, of both passes."""
    found = []
    for phase in ("forward", "backward"):
        points = [p for p in timeline if p.phase == phase]
        found += [max((p.live for p in points), default=0), points[-1].after if points else 0]
    return found


def program_of(fun):
    """The graphs of the last call of `fun`, all of whose outputs have a cotangent."""
    program = fun.last_program
    needed = tuple(spec.requires_grad for spec in program.region.specs)
    given = (True,) * len(program.differentiable)
    backward = program.backward(given, needed, with_states=True)
    return program.runtime_forward.module, backward.module


def nbytes_added_up(program, backward):
    """The bytes that are free once autograd has added up the parts of gradients."""
    slots = program.gradient_slots
    results = results_of(backward)
    parts = {
        i: [r for slot, r in zip(slots, results, strict=True) if slot == i and r] for i in slots
    }
    sums = sum(found[0].meta["val"].nbytes for found in parts.values() if len(found) > 1)
    single = [found[0] for found in parts.values() if len(found) == 1]
    return _nbytes_made(filter(None, results)) - _nbytes_made(single) - sums if parts else 0


def _nbytes_made(values):
    bases = {base_of(value) for value in values}
    return sum(base.meta["val"].nbytes for base in bases if base.op != "placeholder")


def differentiable(outputs) -> list[Tensor]:
    return list({id(y): y for y in outputs if y.requires_grad}.values())


def measured(fun: Callable[[], tuple[Tensor, ...]], wrt: list[Tensor]) -> tuple[list[int], Noted]:
    """The same figures of a step that runs; `fun` gives outputs, and has run before."""
    torch.autograd.grad([y.sum() for y in differentiable(fun())], wrt, allow_unused=True)
    with Noted() as memory:
        outputs = fun()
        found = [memory.peak, memory.live]
        differentiated = differentiable(outputs)
        cotangents = [torch.ones_like(y) for y in differentiated]
        memory.reset_peak()
        grads = gradients_handed_on(differentiated, wrt, cotangents)
        found += [memory.peak, memory.live]
    del grads, outputs
    return found, memory


@cache
def traced(name: str, output: str):
    """A model as a function of nothing, so that every policy shares its trace."""
    torch.manual_seed(0)
    module, x = MODELS[name]()

    def loss():
        return module(x).float().square().mean()

    def logits():
        return module(x)

    return {"loss": loss, "logits": logits}[output], list(module.parameters())


def cases() -> list:
    return [
        pytest.param(
            model,
            output,
            policy,
            marks=() if policy in QUICK and output == "loss" else pytest.mark.slow,
        )
        for model in MODELS
        for output in ("loss", "logits")
        for policy in POLICIES
    ]


@pytest.mark.filterwarnings("ignore::torchremat.errors.UnmatchedWarning")  # one policy for all
@pytest.mark.parametrize(("model", "output", "policy"), cases())
@pytest.mark.sampled(3)
def test_it_equals_what_runs(model, output, policy):
    body, wrt = traced(model, output)
    fun = tr.checkpoint(body, policy=POLICIES[policy])
    found, _ = measured(lambda: (fun(),), wrt)
    timeline = simulate(*program_of(fun))
    assert figures(timeline) == found
    assert sum(v.nbytes for v in timeline.at_peak) == timeline.peak == max(found[0], found[2])
    assert timeline.live == tuple(map(sum, zip(*timeline.by_category().values(), strict=True)))


@pytest.mark.parametrize("model", ["gpt", "gpt, nested", "resnet", "unet"])
def test_it_equals_what_runs_at_each_operator(model):
    body, wrt = traced(model, "loss")
    fun = tr.checkpoint(body, policy="dots")
    _, memory = measured(lambda: (fun(),), wrt)
    timeline = simulate(*program_of(fun))
    seen = [p for p in timeline if "generator_state" not in p.name]  # which is not an operator
    del memory.counts[sum(p.phase == "forward" for p in seen)]  # of ones_like, the cotangent
    assert memory.counts == [p.live for p in seen]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [{}, WRITES, BUFFERS, DRAWS], ids=["", "write", "buffer", "draw"])
@pytest.mark.sampled(3)
def test_it_equals_what_runs_of_random_programs(seed, steps):
    program = Program(seed, more=steps)
    xs = [x.requires_grad_() for x in inputs(seed)]
    fun = tr.checkpoint(program, policy=coin(seed))

    if differentiable(fun(*xs)):
        found, _ = measured(lambda: fun(*xs), [*xs, program.weight])
        expected = figures(simulate(*program_of(fun)))
        expected[3] -= nbytes_added_up(fun.last_program, program_of(fun)[1])
        assert expected == found


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if not a.whole_refused])
def test_it_equals_what_runs_of_models_of_others(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model, batch = architecture.build(), architecture.batch()

    def loss():
        return model(**batch, **architecture.extra).loss

    for policy in ("none", "full", "dots", coin(0)):
        fun = tr.checkpoint(loss, policy=policy)
        trained = [p for p in model.parameters() if p.requires_grad]
        found, _ = measured(lambda fun=fun: (fun(),), trained)
        expected = figures(simulate(*program_of(fun)))
        if fun.last_program.region.body.num_escaped:  # to hooks of the model, which drop them
            assert all(e >= f for e, f in zip(expected, found, strict=True))
        else:
            assert expected == found


def test_backward_accumulates_without_copies():
    """What `.backward()` puts into `.grad` is what the backward graph gave."""
    module, x = MODELS["mixer"]()
    fun = tr.checkpoint(lambda: module(x).square().mean(), policy="full")
    fun().backward()
    module.zero_grad()
    with Noted() as memory:
        loss = fun()
        loss.backward()
    timeline = simulate(*program_of(fun))
    assert memory.peak == timeline.peak
    assert memory.live == timeline.points[-1].after - loss.nbytes  # the cotangent


# --- pairs of graphs, linked by name -------------------------------------------------------------


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_graphs_of_aot_autograd(partition):
    module, x = Mixer(), torch.randn(2, 8, 16)
    names = [name for name, _ in module.named_parameters()]
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    def loss(x, *parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, state, x).square().mean()

    aot_function(loss, keep, keep, partition)(x, *module.parameters()).backward()
    forward, backward = graphs
    assert figures(simulate(forward, backward)) == run_by_hand(
        forward, backward, [x, *module.parameters()]
    )


def run_by_hand(
    forward: fx.GraphModule, backward: fx.GraphModule, given: list[Tensor]
) -> list[int]:
    placeholders, taken = (g.graph.find_nodes(op="placeholder") for g in (forward, backward))
    (output,) = forward.graph.find_nodes(op="output")
    values = {p.name: t.detach() for p, t in zip(placeholders, given, strict=True)}
    with Noted() as memory:
        results = compile_graph(forward)(list(values.values()))
        found = [memory.peak, memory.live]
        values.update(zip((n.name for n in output.args[0]), results, strict=True))
        loss = results[0]
        cotangent = torch.ones(())
        memory.reset_peak()
        operands = [values.get(p.name, cotangent) for p in taken]
        del results
        values.clear()
        grads = compile_graph(backward)(operands)
        found += [memory.peak, memory.live]
    del grads, loss
    return found


def graph_of(fun, *args, results=None) -> fx.GraphModule:
    """The graph of `fun`, whose results are the nodes of these names."""
    module = tr.make_graph(fun)(*args).graph_module
    if results is not None:
        nodes = {node.name: node for node in module.graph.nodes}
        (output,) = module.graph.find_nodes(op="output")
        output.args = (tuple(nodes[name] for name in results),)
    return module


X = torch.ones(256)  # 1 KiB


def test_what_the_backward_graph_takes_by_name_is_saved():
    forward = graph_of(lambda x: x.sin().exp(), X, results=["exp", "sin"])
    backward = graph_of(lambda sin, ct: sin * ct, X, X)
    timeline = simulate(forward, backward)
    assert timeline.live == (1024, 2048, 4096)
    assert [(t.value.name, t.value.category) for t in timeline.lifetimes] == [
        ("sin", "saved"),
        ("exp", "output"),
        ("ct", "cotangent"),
        ("mul", "gradient"),
    ]
    assert timeline.saved_bytes == 1024
    # sin is freed, and ct if autograd hands it over
    assert timeline.points[-1].after == (2048 if FREES_COTANGENTS else 3072)


def test_what_is_there_twice_is_an_output_too():
    backward = graph_of(lambda sin, ct: sin * ct, X, X)
    once = simulate(graph_of(torch.sin, X, results=["sin"]), backward)
    twice = simulate(graph_of(torch.sin, X, results=["sin", "sin"]), backward)
    held = 0 if FREES_COTANGENTS else 1024
    assert (once.saved_bytes, once.points[-1].after) == (1024, 1024 + held)
    assert (twice.saved_bytes, twice.points[-1].after) == (0, 2048 + held)


def test_inputs_count_for_nothing_and_views_for_what_they_look_into():
    timeline = simulate(graph_of(lambda x: (x.view(16, 16).t(), x.exp()[:1]), X))
    assert timeline.peak == 1024
    assert [v.name for v in timeline.at_peak] == ["exp"]


def test_what_is_computed_again_is_told():
    fun = tr.checkpoint(lambda x: x.sin().exp().sum(), policy="full")
    x = torch.ones(256, requires_grad=True)
    fun(x)
    timeline = simulate(*program_of(fun))
    categories = {t.value.name: t.value.category for t in timeline.lifetimes}
    assert timeline.saved_bytes == 0
    assert (categories["exp"], categories["cotangent_0"]) == ("recomputed", "cotangent")
    assert set(categories.values()) <= timeline.by_category().keys()


def test_only_one_kind_of_device():
    forward = graph_of(torch.sin, X)
    assert simulate(forward, device="cpu").peak == 1024
    assert simulate(forward, device="cuda").peak == 0


def test_a_forward_graph_alone_and_one_without_operators():
    assert len(simulate(graph_of(lambda x: x.sin().cos(), X))) == 2
    empty = simulate(graph_of(lambda x: x, X))
    assert (len(empty), empty.peak, empty.at_peak, str(empty)) == (0, 0, (), "no operators run")
    assert all(nbytes == () for nbytes in empty.by_category().values())


def test_the_summary_names_the_largest():
    text = str(simulate(graph_of(lambda x: torch.cat([x, x]).sin(), X)))
    assert text.splitlines() == [
        "peak 4.00 KiB at sin (forward, 2 of 2); 0 B saved by the forward pass",
        "  2.00 KiB cat (temporary)",
        "  2.00 KiB sin (output)",
    ]


# --- bad input -----------------------------------------------------------------------------------


def test_what_is_no_graph_is_refused():
    with pytest.raises(TypeError, match="forward_graph an fx.GraphModule"):
        simulate(torch.sin)
    with pytest.raises(TypeError, match="backward_graph an fx.GraphModule"):
        simulate(graph_of(torch.sin, X), "graph")


def test_graphs_that_do_not_fit_are_refused():
    forward = graph_of(lambda x: x.sin().exp(), X)
    backward = graph_of(lambda sin, ct: sin * ct, X, X)
    with pytest.raises(
        GraphError, match="takes sin, which the forward graph computes but does not"
    ):
        simulate(forward, backward)
    forward.meta["roles"] = ("residual",)
    backward.meta["roles"] = ("cotangent", "cotangent")
    with pytest.raises(GraphError, match="gives 1 residuals, and the backward graph takes 0"):
        simulate(forward, backward)


def test_a_graph_without_values_is_refused():
    with pytest.raises(GraphError, match="node sin has no meta"):
        simulate(fx.symbolic_trace(lambda x: (torch.sin(x),)))


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: none is there")
def test_it_equals_what_the_allocator_was_asked_for():
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "check_device_memory.py"))
    found = script["check_all"](torch.device("cuda", 0), list(script["MODELS"]))
    assert [row for row in found if row.simulated != row.requested] == []
