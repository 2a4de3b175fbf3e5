"""Costs of the nodes of a graph on a device: operations, bytes, seconds.

A roofline: an operator takes as long as its operations or its bytes, whichever take longer, and
no less than its launch. A measured time of an operator, if there is one, replaces it.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Union

import torch
from torch import fx

from torchremat import _torch
from torchremat.autodiff.tiles.tiled_op import TileLayout, tiled_p
from torchremat.errors import ArgumentTypeError, ArgumentValueError
from torchremat.graph.nodes import inner_graphs_of, is_item, is_view
from torchremat.graph.ops import op_name
from torchremat.planning.costs.device_rates import Rates, arch_of, rates_of, this_device
from torchremat.planning.costs.fusion import flops_again, is_read_in_place, is_written
from torchremat.planning.costs.measured_rates import VERSION_OF_RATES, load_rates
from torchremat.planning.costs.op_signature import OpSignature
from torchremat.planning.costs.op_timer import NodeTimer
from torchremat.planning.costs.op_work import Work, has_formula, work_of
from torchremat.remat.program.region import Region
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.tracing.ambient_state import find_gpu, is_nowhere

__all__ = ["measure"]


def __dir__() -> list[str]:
    return sorted(__all__)


Device = Union[str, torch.device, Rates, "CostModel", None]
"""The arguments that `CostModel.of` takes."""

ATTENTION_FRACTION = 0.65
"""Of the rate of large products, what kernels of attention reach: they compute exponentials too."""


@dataclass(frozen=True)
class CostModel:
    """Seconds, operations and bytes of the nodes of a graph, which have fake tensors in their meta.

    Views, items of tuples and identities cost nothing. A node with a graph inside (a checkpoint,
    `scan`) costs what its body costs, `cond` what its more expensive branch does. Symbolic sizes
    have the values that they had when the graph was traced. Models hash, compare by what they say,
    and pickle.

    Attributes:
        rates: what the device does in a second.
        fuses: whether a compiler makes one kernel of pointwise work and what consumes it.
        tf32_matmuls: whether matrix products of float32 use TF32, where there is such.
        tf32_convolutions: likewise, of convolutions.
        timer: measures operators; what it cannot measure is estimated.

    >>> from torchremat import make_graph
    >>> x, w = torch.ones(64, 256), torch.ones(256, 512)
    >>> graph = make_graph(lambda x, w: (x @ w).t())(x, w).graph_module.graph
    >>> _, _, mm, transpose, _ = graph.nodes
    >>> h100 = CostModel.of("h100")
    >>> h100.flops(mm) == 2 * 64 * 512 * 256, h100.bytes_moved(mm)
    (True, 720896)
    >>> h100.seconds(mm) > h100.seconds(transpose) == 0
    True
    """

    rates: Rates
    fuses: bool = False
    tf32_matmuls: bool = False
    tf32_convolutions: bool = False
    timer: NodeTimer | None = None

    @classmethod
    def of(cls, device: Device = None) -> "CostModel":
        """The roofline of a device, as `rates_of` knows it; of `Rates`; or a model as it is.

        TF32 is used if PyTorch's settings allow it now.

        >>> CostModel.of("NVIDIA H100 PCIe")
        CostModel('NVIDIA H100 PCIe')
        """
        if isinstance(device, CostModel):
            return device
        if not isinstance(device, str | torch.device | Rates | None):
            raise ArgumentTypeError(
                f"{device!r} ({type(device).__name__}) is not a device: a cost model is made of a "
                "name ('h100'), a torch.device, Rates, or another CostModel"
            )
        convolution = torch.backends.cudnn.conv  # type: ignore[attr-defined]
        return cls(
            device if isinstance(device, Rates) else rates_of(device),
            tf32_matmuls=torch.backends.cuda.matmul.fp32_precision == "tf32",
            tf32_convolutions=convolution.fp32_precision == "tf32",
        )

    @classmethod
    def profiled(cls, device: "str | torch.device | None" = None) -> "CostModel":
        """Times each operator on `device`, on random tensors of the shapes in the graph.

        The times are cached on disk, see `measure`. An operator that cannot run so (it raises, or
        takes a quarter of the free memory or more) is estimated by the rates of `measure`.

        >>> CostModel.profiled("cpu")  # doctest: +SKIP
        CostModel('AMD EPYC, threads 2, measured', profiled on cpu)
        """
        here = this_device(device)
        return replace(measure(here), timer=NodeTimer(here))

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write the rates to a file, for machines that have no such device.

        It is JSON, to be read and mended by people too. Times of `profiled` are not in it.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     CostModel.of("h100").save(f"{folder}/h100.json")
        ...     CostModel.load(f"{folder}/h100.json")
        CostModel('NVIDIA H100 SXM')
        """
        content = {"version": VERSION_OF_RATES, "rates": asdict(self.rates)}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "CostModel":
        """The model of the rates in a file that `save` wrote; TF32 as `of` has it.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not such a file, or a rate in it is none.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            version, rates = content["version"], Rates(**content["rates"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentValueError(
                f"{os.fspath(path)} has no rates of a device ({error}): write it with "
                "cost_model.measure('cuda').save(...) on a machine that has the device"
            ) from error
        if version != VERSION_OF_RATES:
            raise ArgumentValueError(
                f"{os.fspath(path)} has rates of version {version}, and this torchremat reads "
                f"{VERSION_OF_RATES}: measure the device again, with the same torchremat"
            )
        return cls.of(rates)

    def fused(self) -> "CostModel":
        """The model for a plan that a compiler runs; budgets under inductor use it by themselves.

        A pointwise operator all of whose consumers are pointwise or reductions runs in their
        kernel: it costs what it reads from outside, and writes and launches nothing. So does a
        normalisation, for which means and variances are there when it runs again.
        """
        return replace(self, fuses=True)

    def flops(self, node: fx.Node) -> int:
        """The floating-point operations of `node`, as PyTorch's `FlopCounterMode` counts them."""
        return round(self._total(node, lambda n: work_of(OpSignature.of(n)).matmul_flops))

    def bytes_moved(self, node: fx.Node) -> int:
        """The bytes that `node` reads and writes; with `fuses`, from and to other kernels."""
        return round(self._total(node, lambda n: self._bytes(n, work_of(OpSignature.of(n)))))

    def seconds(self, node: fx.Node) -> float:
        """The time that `node` takes."""
        return self._total(node, self._seconds)

    def transfer_seconds(self, nbytes: int) -> float | None:
        """The time to copy so many bytes between device and host; `None` without a link.

        >>> CostModel.of("cpu").transfer_seconds(1 << 20) is None
        True
        """
        link = self.rates.host_bytes_per_second
        return None if link is None else nbytes / (link * self.rates.memory_fraction)

    def __repr__(self) -> str:
        said = [repr(self.rates.name)]
        said += ["fuses=True"] if self.fuses else []
        said += [f"profiled on {self.timer.device}"] if self.timer else []
        return f"CostModel({', '.join(said)})"

    def _total(self, node: fx.Node, cost: Callable[[fx.Node], float]) -> float:
        if node.op != "call_function" or is_item(node) or is_view(node):
            return 0
        bodies = [] if has_formula(node.target) else inner_graphs_of(node)
        if not bodies:
            return cost(node)
        totals = [sum(self._total(n, cost) for n in body.graph.nodes) for body in bodies]
        if op_name(node.target) == "higher_order.cond":
            return max(totals)
        return _num_rounds(node) * sum(totals)

    def _seconds(self, node: fx.Node) -> float:
        is_alone = not self.fuses or is_written(node)
        return self._seconds_of(OpSignature.of(node), partial(self._bytes, node), is_alone=is_alone)

    def seconds_of_call(self, call: OpSignature) -> float:
        """The time that a call takes by itself, where no graph says who reads its results."""
        return self._seconds_of(call, _count_bytes, is_alone=True)

    def _seconds_of(
        self, call: OpSignature, nbytes: Callable[[Work], int], *, is_alone: bool
    ) -> float:
        work = work_of(call)
        if not work.writes and not any(work.reads):
            return 0.0 if not call.outputs() else self.rates.launch_seconds
        if self.timer is not None and is_alone:
            measured = self.timer.seconds(call)
            if measured is not None:
                return measured
        seconds = max(
            self._matmul_seconds(work) + self._pointwise_flops(call, work) / self.rates.pointwise,
            nbytes(work) / self.rates.memory_rate(),
        )
        if not is_alone:
            return seconds
        launch = self.rates.launch_seconds
        return max(launch, seconds) if self.rates.runs_ahead else launch + seconds

    def _pointwise_flops(self, call: OpSignature, work: Work) -> int:
        again = flops_again(call.target) if self.fuses else None
        if again is None:
            return work.pointwise_flops
        return again * max(layout.num_elements for layout in call.outputs())

    def _matmul_seconds(self, work: Work) -> float:
        tf32 = self.tf32_convolutions if work.kind == "conv" else self.tf32_matmuls
        flops = work.matmul_flops * (4 if work.matmul_dtype.is_complex else 1)
        rate = self.rates.matmul_rate(work.matmul_dtype, tf32=tf32)
        return flops / (rate * (ATTENTION_FRACTION if work.kind == "attention" else 1.0))

    def _bytes(self, node: fx.Node, work: Work) -> int:
        if not self.fuses:
            return _count_bytes(work)
        inputs = zip(node.all_input_nodes, work.reads, strict=True)
        reads = sum(nbytes for source, nbytes in inputs if not is_read_in_place(source))
        return reads + (work.writes if is_written(node) else 0)


def _count_bytes(work: Work) -> int:
    return sum(work.reads) + work.writes


def _num_rounds(node: fx.Node) -> int:
    """How many times the body of `node` runs: as often as there are tiles, or slices to scan."""
    if node.target is tiled_p:
        layout = node.args[1]
        assert isinstance(layout, TileLayout)
        return layout.num_tiles
    if op_name(node.target) not in ("higher_order.scan", "higher_order.map_impl"):
        return 1
    index = 2 if op_name(node.target) == "higher_order.scan" else 1
    sliced = node.args[index]
    assert isinstance(sliced, tuple | list)
    shapes = [n.meta["val"].shape for n in sliced if isinstance(n, fx.Node)]
    return _torch.hint_of(shapes[0][0]) if shapes else 1


def measure(device: "str | torch.device | None" = None, *, again: bool = False) -> CostModel:
    """Measure the rates of a device of this machine: its real roofline.

    It takes a few seconds, once. Rates are cached as JSON, by device, number of threads and version
    of PyTorch. The folder is the one that the environment variable `TORCHREMAT_CACHE_DIR` names,
    else `~/.cache/torchremat`. A file that cannot be read or written is only logged, by the logger
    `torchremat`.

    Args:
        device: `"cpu"`, `"cuda"`, ...; `None` means this machine's accelerator, else the CPU.
        again: measure though there are rates.

    Raises:
        ValueError: for `meta`, where nothing runs, and for what is not a device.
        RuntimeError: for a device that this machine does not have.

    >>> measure("meta")
    Traceback (most recent call last):
    torchremat.errors.ArgumentValueError: nothing runs on the device 'meta', ...
    """
    if device is not None and str(device).startswith("meta"):
        raise ArgumentValueError(
            "nothing runs on the device 'meta', so that nothing can be measured there: measure "
            "'cpu' or 'cuda', or take the figures of a data sheet: CostModel.of('h100')"
        )
    return CostModel.of(load_rates(this_device(device), again=again))


def device_of(region: Region) -> torch.device | None:
    """Where the tensors of a step are; `None` if they are on the meta device."""
    devices = [spec.device for spec in region.specs if spec.device.type != "meta"]
    return next((device for device in devices if device.type != "cpu"), next(iter(devices), None))


UNKNOWN_GPU = "generic-gpu"
"""The device whose rates are taken for one that is not here and has no name."""


@dataclass(frozen=True)
class StepDevice:
    """Where a step is to run.

    Tensors on the meta device, and fake ones on a device that is not here, are traced as those of
    this device: with the kernels that PyTorch takes there. Others are traced where they are.

    Attributes:
        model: what operators cost there; `None` if the tensors of the step say it.
        gpu: the GPU whose kernels a trace takes; `None` if it takes those of its tensors' device.
    """

    model: CostModel | None
    gpu: _torch.Gpu | None

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        cost_model: CostModel | None,
        device: str | torch.device | None,
    ) -> "StepDevice":
        """The device of a call, from what the user said of it and where the tensors are."""
        if cost_model is not None and not isinstance(cost_model, CostModel):
            raise ArgumentTypeError(
                f"cost_model={cost_model!r} is none: give a CostModel, such as "
                "CostModel.of('h100') or cost_model.measure('cuda')"
            )
        nowhere = [t for t in BoundCall(fun, args, kwargs).list_tensors() if is_nowhere(t)]
        model = cost_model if device is None else cost_model or CostModel.of(device)
        if model is None and nowhere:
            # of a fake tensor's GPU the name is not known
            model = CostModel.of(this_device(None) if find_gpu(nowhere) is None else UNKNOWN_GPU)
        arch = arch_of(model.rates) if model is not None and nowhere else None
        return cls(model, None if arch is None else _torch.Gpu(arch))

    def model_of(self, region: Region) -> CostModel:
        return self.model or CostModel.of(device_of(region))
