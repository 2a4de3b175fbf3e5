"""The function that a program differentiates, of flat tensors, with its joint graphs."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from torchremat.autodiff.bodies import Body
from torchremat.autodiff.joint import Joint, TraceOptions, trace_joint
from torchremat.autodiff.matching import match_forward
from torchremat.autodiff.rewrites.fewer_cotangents import NotLinearError, drop_cotangents
from torchremat.autodiff.rewrites.rewrite import rewrite_joint
from torchremat.autodiff.specialize import specialize_joint
from torchremat.errors import RetraceError
from torchremat.graph.symbolic_sizes import Sizes
from torchremat.remat.program.shared_graphs import SharedGraphs
from torchremat.tracing.axes.named_axes import AxisName
from torchremat.tracing.dynamic_inputs import DynamicInputs, spec_at
from torchremat.tracing.input_spec import InputSpec
from torchremat.tracing.modules.module_paths import ModulePaths

Mask = tuple[bool, ...]
"""Says which differentiable outputs have a cotangent, or which inputs need a gradient."""

_CAPTURED = "captured_"
"""The names of inputs that a body closes over, such as parameters, begin so."""


class Region:
    """A body with its joint graphs: one for each set of outputs that has a cotangent."""

    def __init__(
        self,
        body: Body,
        specs: Sequence[InputSpec],
        names: Sequence[str],
        paths: ModulePaths,
        options: TraceOptions,
        forward_of: "Region | None" = None,
        dynamic: DynamicInputs | None = None,
        joint: Joint | None = None,
    ) -> None:
        self.body = body
        self.forward_of = forward_of
        self.specs = tuple(specs)
        self.names = tuple(names)
        self.paths = paths
        self.options = options
        self.dynamic = dynamic
        self.graphs: SharedGraphs | None = None
        """The compiled graphs of `joint`, if regions of alike layers have it too."""
        self._joint = joint
        self._variants: dict[tuple[Mask, bool], Joint] = {}
        self._seen_outputs: Mask | None = None
        """The outputs of backward passes, once one was of others than was assumed."""

    @classmethod
    def trace(
        cls,
        body: Body,
        specs: Sequence[InputSpec],
        names: Sequence[str],
        paths: ModulePaths,
        options: TraceOptions,
        dynamic: DynamicInputs | None = None,
    ) -> "Region":
        """Trace `body` now; what it closes over becomes further inputs."""
        joint, tracing = trace_joint(body, specs, names, paths, options, warns=True)
        if not options.create_graph:
            rewrite_joint(joint.module.graph)
        captured = [InputSpec.of(t, any_level=True) for t in tracing.captured]
        labels = [f"{_CAPTURED}{i}" for i in range(len(captured))]
        return cls(
            body,
            (*specs, *captured),
            (*names, *labels),
            paths,
            options,
            dynamic=dynamic,
            joint=joint,
        )

    @property
    def joint(self) -> Joint:
        """The joint graph in which every differentiable output has a cotangent."""
        if self._joint is None:
            self._joint = self._trace(self.options)
        return self._joint

    def shares(self, joint: Joint) -> bool:
        """Whether `joint` is one that regions of alike layers have too."""
        if self.graphs is None:
            return False
        return joint is self._joint or any(v is joint for v in self.graphs.variants.values())

    @property
    def usual_outputs(self) -> Mask:
        """The outputs that a training step gives a cotangent, as far as is known.

        They are assumed as `autodiff.joint.usual_outputs` says, until a backward pass shows others.
        """
        return self._seen_outputs or self._assumed_outputs

    def note_cotangents(self, given: Mask) -> None:
        """Let the outputs be usual that backward passes gave a cotangent."""
        before = self._seen_outputs or (False,) * len(given)
        self._seen_outputs = tuple(a or b for a, b in zip(given, before, strict=True))

    @cached_property
    def _assumed_outputs(self) -> Mask:
        usual = tuple(i in self.joint.usual for i in self.differentiable)
        if any(usual) and len(self.joint_for(usual).inputs) == len(self.joint.inputs):
            return usual
        return (True,) * len(usual)  # or a trace finds new tensors each time, not inputs of ours

    def joint_for(self, outputs_with_cotangent: Mask, *, create_graph: bool = False) -> Joint:
        """The joint graph in which only these outputs have a cotangent.

        With `create_graph` it has the formulas of a derivative that is differentiated again.
        """
        if all(outputs_with_cotangent) and not create_graph:
            return self.joint
        key = (outputs_with_cotangent, create_graph)
        shared = {} if self.graphs is None else self.graphs.variants
        if key not in self._variants and key in shared:
            self._variants[key] = shared[key]
        if key not in self._variants:
            pairs = zip(self.differentiable, outputs_with_cotangent, strict=True)
            wanted = tuple(i for i, given in pairs if given)
            options = replace(self.options, wanted_outputs=wanted, create_graph=create_graph)
            self._variants[key] = self._make_variant(options, wanted)
            if not self.paths.are_reads_late:  # else it depends on what no guard has compared
                shared[key] = self._variants[key]
        return self._variants[key]

    def _make_variant(self, options: TraceOptions, wanted: tuple[int, ...]) -> Joint:
        if not (options.create_graph or self.joint.runs_own_backward):  # which may ask what is None
            with suppress(NotLinearError):
                joint = drop_cotangents(self.joint, wanted, may_add_zeros=False)
                rewrite_joint(joint.module.graph)
                return joint
        try:
            return self._trace(options)
        except RetraceError:  # the function is not what it was: its first trace has to do
            if options.create_graph:
                raise
            with suppress(NotLinearError):
                return drop_cotangents(self.joint, wanted)
            raise

    def _trace(self, options: TraceOptions) -> Joint:
        joint, _ = trace_joint(self.body, self.specs, self.names, self.paths, options)
        first = self._joint
        if first is None and self.forward_of is not None:
            first = self.forward_of.joint
        if first is not None:  # raises if the function now computes something else
            match_forward(first, joint, first.find_live_forward_nodes())
        if not options.create_graph:
            rewrite_joint(joint.module.graph)
        return joint

    def holds(self, sizes: Sizes) -> bool:
        """Whether all that traces have assumed of the symbols so far is true of `sizes`."""
        return self.dynamic is None or self.dynamic.holds(sizes)

    def specialize(self, sizes: Sizes) -> tuple["Region", Mapping[fx.Node, fx.Node]]:
        def make() -> tuple[Joint, Mapping[fx.Node, fx.Node]]:
            return specialize_joint(self.joint, sizes)

        made, graphs = (make(), None) if self.graphs is None else self.graphs.at(sizes, make)
        specs = tuple(spec_at(spec, sizes) for spec in self.specs)
        joint, nodes = made
        own = (self.body, specs, self.names, self.paths, self.options)
        region = Region(*own, joint=joint)
        region.graphs = graphs
        return region, nodes

    @cached_property
    def wrt(self) -> tuple[int, ...]:
        if not self.options.with_gradients:
            return ()
        return tuple(i for i, spec in enumerate(self.specs) if spec.requires_grad)

    @property
    def argument_has_gradient(self) -> bool:
        """Whether an argument gets a gradient, not only what the body closes over."""
        return any(not self.names[i].startswith(_CAPTURED) for i in self.wrt)

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(i for i, ct in enumerate(self.joint.cotangents) if ct is not None)


@dataclass(frozen=True)
class VmapAxis:
    """The axis of a `vmap`: where it is in each input, its size, and what random numbers do."""

    in_dims: tuple[int | None, ...]
    size: int
    randomness: str
    name: AxisName = None
