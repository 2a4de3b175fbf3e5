#!/usr/bin/env python
"""Lower the halves of a step to kernels of GPUs that need not be here, and assemble those.

    python scripts/lower_for_gpus.py             5 minutes on two cores
    python scripts/lower_for_gpus.py --quick     one model for two GPUs, printed as JSON

A policy or a plan cuts a step into a forward and a backward graph. Inductor makes Triton kernels of
both, for CUDA and ROCm, and Triton's assembler takes them; beside it are the halves that PyTorch's
own partitioner cuts. The page is docs/measured/lowered.md. PyTorch is told by hand what it asks of
a device: `Machine` has all of it. What only a device can do is left out, and the page says so.
"""

import argparse
import ctypes
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor, fx, nn
from torch._dynamo import device_interface
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import record_original_output_strides, view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.memory import prepare_planning_info
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchremat as tr
from scripts.compile_gpu_kernels import TARGETS, read_resources
from scripts.planning_peers import partitioner_input
from torchremat import _torch
from torchremat.planning.api import _prepare

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "lowered.md"
_META, _CUDA = 14, 1
# The numbers of these kinds of devices in c10/core/DeviceType.h.
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


@dataclass(frozen=True)
class Machine:
    """A GPU as PyTorch and Triton ask for it, by its data sheet."""

    target: str
    name: str
    processors: int
    shared_bytes: int
    warp_size: int = 32

    @property
    def properties(self) -> SimpleNamespace:
        found = re.fullmatch(r"sm_(\d+)(\d)", self.target)
        return SimpleNamespace(
            name=self.name,
            major=int(found[1]) if found else 9,
            minor=int(found[2]) if found else 4,
            multi_processor_count=self.processors,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            warp_size=self.warp_size,
            shared_memory_per_block_optin=self.shared_bytes,
            shared_memory_per_multiprocessor=self.shared_bytes,
            total_memory=80 << 30,
            L2_cache_size=40 << 20,
            gcnArchName=self.target,
        )

    @property
    def triton_target(self) -> GPUTarget:
        return GPUTarget(*TARGETS[self.target])


MACHINES = (
    Machine("sm_80", "NVIDIA A100", 108, 166912),
    Machine("sm_90", "NVIDIA H100", 132, 232448),
    Machine("sm_100", "NVIDIA B200", 148, 232448),
    Machine("gfx90a", "AMD Instinct MI210", 104, 65536, 64),
    Machine("gfx942", "AMD Instinct MI300X", 304, 65536, 64),
)


class _Driver:
    """The driver of Triton, of which compiling asks only the target."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _interface_of(machine: Machine) -> type:
    """The device interface of inductor, with the properties of a GPU that is not here."""
    is_nvidia = machine.target.startswith("sm_")
    capability = int(machine.target[3:]) if is_nvidia else machine.target
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "get_compute_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: machine.properties,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "is_bf16_supported": lambda including_emulation=False: True,
    }
    static = {name: staticmethod(answer) for name, answer in answers.items()}
    plain = device_interface.CudaInterface
    worker = type("Worker", (plain.Worker,), static)
    return type("Given", (plain,), {**static, "Worker": worker})


@contextmanager
def give(machine: Machine) -> Iterator[None]:
    """Tell PyTorch and Triton that `machine` is here, as far as compiling asks."""
    folder = Path(torch.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(folder.glob("libc10.*"))))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    plain = device_interface.get_interface_for_device("cuda")
    guard = guards[_CUDA]
    properties, target = machine.properties, machine.triton_target
    with ExitStack() as stack:
        stack.callback(guards.__setitem__, _CUDA, guard)
        guards[_CUDA] = guards[_META]  # it does nothing, and fake tensors need no more
        stack.callback(device_interface.register_interface_for_device, "cuda", plain)
        device_interface.register_interface_for_device("cuda", _interface_of(machine))
        triton.runtime.driver.set_active(_Driver(target))
        answers = {
            "torch.cuda.get_device_properties": lambda *_: properties,
            "torch.cuda.get_device_capability": lambda *_: (properties.major, properties.minor),
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.is_available": lambda: True,
            "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": lambda: None,
        }
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        hip = None if machine.target.startswith("sm_") else "7.0"
        stack.enter_context(mock.patch("torch.version.hip", hip))
        DeviceProperties.create.cache_clear()
        stack.callback(DeviceProperties.create.cache_clear)
        yield


@dataclass(frozen=True)
class Lowered:
    """A half of a step as inductor lowers it.

    Attributes:
        sources: the Triton kernels by name.
        num_others: calls of kernels that libraries have: products, convolutions, attention.
        nbytes: what all kernels read and write.
        peak: the most bytes of buffers that the wrapper holds, the saved values among them.
    """

    sources: dict[str, str]
    num_others: int
    nbytes: int
    peak: int


def lower(module: fx.GraphModule, named: Sequence[tuple[str, Tensor]]) -> Lowered:
    """Lower a graph of ATen operators for the machine that is given; its inputs have names.

    Those that begin with `primals` are there before and after; others are freed when they are read.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        config.patch(compile_threads=1, joint_graph_constant_folding=False),
        torch.no_grad(),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
    ):
        inputs = _on_gpu([value for _, value in named], mode)
        plain = _torch.decompose(module, inputs, _torch.inductor_decompositions())
        for node, (name, _) in zip(plain.graph.find_nodes(op="placeholder"), named, strict=True):
            node.name = node.target = name
        plain.recompile()
        joint_graph_passes(plain)
        output = plain.graph.output_node()
        results = enumerate(output.args[0])
        visible = [i for i, result in results if isinstance(result, fx.Node)]
        output.meta["user_visible_output_idxs"] = visible
        view_to_reshape(plain)
        post_grad_passes(plain, True)
        record_original_output_strides(plain)
        graph = GraphLowering(plain, example_inputs=inputs, is_inference=True)
        with DebugContext(), V.set_graph_handler(graph):
            graph.run(*inputs)
            code, _ = graph.codegen()
            nbytes, _, _ = graph.count_bytes()
            return _read(code.value, nbytes, _peak_of(graph))


def _on_gpu(values: Sequence[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    with mode:
        return [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cuda:0") for v in values
        ]


def _peak_of(graph: GraphLowering) -> int:
    scheduler = graph.scheduler
    inputs, outputs = graph.graph_inputs.keys(), graph.get_output_names()
    ordered = [torch.utils._ordered_set.OrderedSet(names) for names in (inputs, outputs)]
    peak, _ = prepare_planning_info(
        scheduler.nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, *ordered
    )
    return int(peak)


_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", re.M | re.S)
_OTHER = re.compile(r"= extern_kernels\.|^\s+extern_kernels\.|= torch\.ops\.", re.M)


def _read(code: str, nbytes: int, peak: int) -> Lowered:
    sources = {name: source for name, source in _KERNEL.findall(code)}
    return Lowered(sources, len(_OTHER.findall(code)), nbytes, peak)


def assemble(source: str, folder: Path, stem: str, name: str) -> Any:
    """Compile the first configuration of a kernel of inductor for the machine that is given.

    Which configuration is fastest, inductor finds out by running them all: that needs the device.
    """
    path = folder / f"{stem}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner = getattr(module, name)
    meta = tuner._create_compile_meta(tuner.configs[0])
    made = triton.compiler.ASTSource(
        tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]
    )
    target = GPUTarget(meta["device_type"], meta["cc"], tuner.device_props.warp_size_or_default)
    options = tuner._create_compile_options(tuner.configs[0], meta)
    return triton.compile(made, target=target, options=options)


# --- halves of a step ----------------------------------------------------------------------------

Half = tuple[fx.GraphModule, list[tuple[str, Tensor]]]


def cut_by_plan(fun: Callable[..., Any], x: Tensor, budget: str) -> tuple[Half, Half]:
    """The halves of a plan."""
    fused = tr.planning.CostModel.of("h100").fused()
    plan = tr.plan(fun, x, budget=budget, cost_model=fused)
    halves = plan.forward_graph, plan.backward_graph
    known = {node.name for node in halves[0].graph.find_nodes(op="placeholder")}
    forward, backward = (_name_inputs(half, known) for half in halves)
    return forward, backward


def cut_by_partitioner(fun: Callable[..., Any], x: Tensor) -> tuple[Half, Half]:
    """The halves of PyTorch's minimum cut, the default of torch.compile, on the same graph."""
    joint = _prepare(fun, (x,), {}, None, "auto", None, "h100", False).joint
    module, num_outputs = partitioner_input(joint)
    placeholders = module.graph.find_nodes(op="placeholder")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values = [node.meta["val"] for node in placeholders]
    with (
        config.patch(joint_graph_constant_folding=False),
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        torch.no_grad(),
    ):
        inputs = _on_gpu(values, mode)
        plain = _torch.decompose(module, inputs, _torch.inductor_decompositions())
        for node, known in zip(plain.graph.find_nodes(op="placeholder"), placeholders, strict=True):
            node.name = node.target = known.name
        plain.recompile()
        joint_graph_passes(plain)
        halves = _torch.min_cut_partition(plain, inputs, num_fwd_outputs=num_outputs)
    known = {node.name for node in placeholders if node.name.startswith("primals")}
    forward, backward = (_name_inputs(half, known) for half in halves)
    return forward, backward


def _name_inputs(module: fx.GraphModule, known: set[str]) -> Half:
    """The inputs of a half: those of the step are there after it, saved values are not."""
    nodes = module.graph.find_nodes(op="placeholder")
    kinds = ("primals" if node.name in known else "saved" for node in nodes)
    return module, [
        (f"{kind}_{i}", n.meta["val"]) for i, (kind, n) in enumerate(zip(kinds, nodes, strict=True))
    ]


# --- models --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer, without dropout: inductor draws its numbers in its own way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        functional = nn.functional
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def _gated() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(512, 2048), nn.SiLU(), nn.Linear(2048, 512), nn.RMSNorm(512)]
    return nn.Sequential(*layers, *layers), torch.empty(64, 128, 512)


def _transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Block(512) for _ in range(2))).bfloat16(), torch.empty(
        8, 512, 512, dtype=torch.bfloat16
    )


def _convolutions() -> tuple[nn.Module, Tensor]:
    def stage(width: int, wider: int) -> list[nn.Module]:
        return [nn.Conv2d(width, wider, 3), nn.GroupNorm(8, wider), nn.ReLU()]

    return nn.Sequential(*stage(3, 32), *stage(32, 64)), torch.empty(16, 3, 64, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gated layers, float32": _gated,
    "two blocks of a transformer, bfloat16": _transformer,
    "convolutions, float32": _convolutions,
}
CUTS = {"the minimum cut": None, "plan, 100 %": "100%", "plan, 70 %": "70%"}


@dataclass(frozen=True)
class Row:
    """What both halves of a step become on one GPU."""

    model: str
    cut: str
    target: str
    kernels: int
    others: int
    mebibytes: float
    peak: float
    registers: int
    spills: int
    shared: int


def measure(model: str, cut: str, machine: Machine) -> Row:
    with torch.device("meta"):
        module, x = MODELS[model]()

    def step(x: Tensor) -> Tensor:
        return module(x).square().sum()

    with give(machine):
        budget = CUTS[cut]
        halves = cut_by_partitioner(step, x) if budget is None else cut_by_plan(step, x, budget)
        lowered = [lower(*half) for half in halves]
        found = [
            read_resources(assemble(source, Path(folder), f"{name}_{i}", name))
            for folder in [tempfile.mkdtemp()]
            for i, half in enumerate(lowered)
            for name, source in half.sources.items()
        ]
    return Row(
        model, cut, machine.target, len(found), sum(half.num_others for half in lowered),
        sum(half.nbytes for half in lowered) / 2**20, max(half.peak for half in lowered) / 2**20,
        *(max(column) for column in zip(*map(astuple, found), strict=True)),
    )  # fmt: skip


HOW = """
## What was given by hand

Made by `python scripts/lower_for_gpus.py`, which needs no GPU, with PyTorch {torch} and Triton
{triton}. What they ask of a device was given:

- a guard for `cuda` that does nothing, in PyTorch's table of guards: a build for the CPU has none;
- a device interface of inductor, and functions of `torch.cuda`, that give the data sheet:
  processors, registers, threads, shared memory and the compute capability;
- for AMD, `torch.version.hip`;
- a driver of Triton that names the target.

Left out is what only a device can do. Inductor tries several configurations of a kernel and takes
the fastest: the first is assembled here. It folds constants by computing them on the device: not
here. Products are libraries', as without `max_autotune`.
"""


def write_page(rows: Sequence[Row]) -> None:
    spilling = sum(row.spills > 0 for row in rows)
    lines = [
        "# Halves of steps, lowered for GPUs that are not here\n",
        "The forward and backward graphs of plans become kernels of inductor, which assemble",
        f"for {len(MACHINES)} GPUs. {spilling or 'None'} of {len(rows)} rows spill registers.\n",
        "*Triton* and *others* count kernels of inductor and calls of libraries in both halves.",
        "*Moved* is the MiB that all read and write. *Peak* is of the wrapper's buffers in MiB,",
        "saved values among them, by inductor's own count. The last columns are the most of all",
        "kernels: registers, bytes that spill, and bytes of shared memory.\n",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        lines += [
            f"## {model[0].upper()}{model[1:]}\n",
            "| halves of | GPU | Triton | others | moved | peak | registers | spill | shared |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in rows:
            if row.model == model:
                lines.append(
                    f"| {row.cut} | {row.target} | {row.kernels} | {row.others} "
                    f"| {row.mebibytes:,.0f} | {row.peak:,.0f} | {row.registers} | {row.spills} "
                    f"| {row.shared:,} |"
                )
        lines.append("")
    how = HOW.format(torch=torch.__version__.partition("+")[0], triton=triton.__version__)
    PAGE.write_text("\n".join(lines).rstrip() + "\n" + how)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model, two GPUs, JSON")
    arguments = parser.parse_args()
    models, cuts, machines = list(MODELS), list(CUTS), list(MACHINES)
    if arguments.quick:
        models, cuts, machines = models[:1], [cuts[0], cuts[-1]], [machines[1], machines[4]]
    rows = [measure(model, cut, gpu) for model in models for cut in cuts for gpu in machines]
    if arguments.quick:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        write_page(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
