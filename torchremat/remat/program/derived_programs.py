"""Transformations of a program, one short function each; the result is a program again.

    vjp_program(program)       inputs, cotangents, residuals -> gradients
    jvp_program(program)       inputs, tangents of some      -> tangents of the outputs
    batch_program(program)     inputs with an axis           -> outputs with that axis

Each result is cached by the program that it is made of.
"""

from dataclasses import replace
from functools import cached_property

from torch import fx

from torchremat.autodiff.bodies import BatchedBody, GraphBody, JvpBody, VjpBody
from torchremat.autodiff.joint import TraceOptions
from torchremat.autodiff.replay_rules import draws_in_forward
from torchremat.autodiff.rewrites.matched_values import find_codes
from torchremat.graph.nodes import inner_graphs_of, is_inexact
from torchremat.graph.slicing import slice_graph
from torchremat.remat.program.compiled_graph import BackwardInputs, CompiledGraph, compile_backward
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.program import Program, cache_by_program, mark_kept_apart
from torchremat.remat.program.region import Mask, Region, VmapAxis
from torchremat.tracing.input_spec import InputSpec

OutDims = tuple[int | None, ...]


@cache_by_program
def vjp_program(
    program: Program, outputs_with_cotangent: Mask, missing_inputs: frozenset[int]
) -> "VjpProgram":
    """The program of `program.backward`, which can be differentiated again."""
    return VjpProgram(program, outputs_with_cotangent, missing_inputs)


@cache_by_program
def jvp_program(
    program: Program, wrt: tuple[int, ...], specs: tuple[InputSpec, ...], *, keep_primals: bool
) -> FunctionProgram:
    """The program from inputs and tangents of the inputs `wrt` to tangents of the outputs.

    With `keep_primals` the outputs themselves come first.
    """
    region = program.region
    floating = tuple(
        i
        for i, output in enumerate(region.joint.outputs)
        if isinstance(output, fx.Node) and is_inexact(output)
    )
    body = JvpBody(region.body, len(region.specs), wrt, floating, keep_primals)
    names = (*region.names, *(f"tangent_{i}" for i in wrt))
    options = TraceOptions(
        any(spec.requires_grad for spec in specs), opens_calls=region.options.opens_calls
    )
    traced = Region(body, specs, names, region.paths, options)
    return FunctionProgram(traced, program.policy.without_job(), compiler=program.compiler)


@cache_by_program
def floating_outputs(program: Program) -> tuple[int, ...]:
    """Positions among the tensor outputs of those that `jvp_program` gives a tangent."""
    nodes = [output for output in program.region.joint.outputs if isinstance(output, fx.Node)]
    return tuple(i for i, node in enumerate(nodes) if is_inexact(node))


@cache_by_program
def batch_program(
    program: Program, specs: tuple[InputSpec, ...], axis: VmapAxis, *, returns_residuals: bool
) -> tuple[Program, OutDims]:
    """The program mapped over an axis of its inputs, and where that axis is in each output.

    `specs` are the inputs with the axis. With `returns_residuals` the residuals are outputs: a
    level of `torch.func` above saves them.
    """
    if returns_residuals or not isinstance(program, FunctionProgram):
        mapped = BatchedProgram(program, specs, axis)
        return mapped, mapped.out_dims
    region = program.region
    body = BatchedBody(region.body, axis.in_dims, axis.size, axis.randomness, axis.name)
    grad_enabled = region.options.grad_enabled
    options = TraceOptions(
        grad_enabled and any(spec.requires_grad for spec in specs),
        grad_enabled=grad_enabled,
        opens_calls=region.options.opens_calls,
    )
    batched = FunctionProgram(
        Region(body, specs, region.names, region.paths, options),
        program.policy.without_job(),
        module_prefix=program.module_prefix,
        compiler=program.compiler,
    )
    outputs = zip(body.out_dims, batched.region.joint.outputs, strict=True)
    return batched, tuple(dim for dim, output in outputs if isinstance(output, fx.Node))


class VjpProgram(Program):
    """The vector-Jacobian product of a program: body inputs, cotangents and known values in.

    It saves nothing but its inputs: what a derivative of higher order needs is recomputed.
    """

    non_differentiable = ()  # its own joint graph is traced only when it is differentiated

    def __init__(
        self, of: Program, outputs_with_cotangent: Mask, missing_inputs: frozenset[int]
    ) -> None:
        region = of.region
        num_body = len(region.specs)
        gradients = region.joint_for(outputs_with_cotangent).gradients
        self.wrt = tuple(i for i, g in enumerate(gradients) if g is not None)
        """The positions of the inputs of `of` that its outputs are gradients of."""
        self._of = of
        self._joint = of.joint_for(outputs_with_cotangent)
        if not any(inner_graphs_of(node) for node in region.joint.module.graph.nodes):
            # the formulas that plain autograd uses with create_graph; a checkpoint inside has them
            # where it is applied itself
            self._joint = region.joint_for(outputs_with_cotangent, create_graph=True)
        self._cotangents = tuple(ct for ct in self._joint.cotangents if ct is not None)
        pairs = zip(region.differentiable, outputs_with_cotangent, strict=True)
        specs = (InputSpec.of(ct.meta["val"]) for ct in self._cotangents)
        vjp_region = Region(
            VjpBody(region.body, num_body, self.wrt, tuple(i for i, given in pairs if given)),
            (*region.specs, *(replace(spec, requires_grad=True) for spec in specs)),
            (*region.names, *(ct.name for ct in self._cotangents)),
            region.paths,
            TraceOptions(True, opens_calls=region.options.opens_calls),
            forward_of=region,
        )
        super().__init__(
            vjp_region,
            of.policy,
            known_values=(*of.known_values, *of.residuals),
            missing_inputs=missing_inputs,
            compiler=of.compiler,
        )
        self.root_joint = of.root_joint
        self.saved_inputs = tuple(i for i in range(self.num_inputs) if i not in missing_inputs)

    @cached_property
    def output_nodes(self) -> tuple[fx.Node, ...]:
        return tuple(g for g in self._joint.gradients if g is not None)

    @cached_property
    def forward(self) -> CompiledGraph:
        known = self._of.values_in(self._joint, self.known_values)
        inputs: list[fx.Node | None] = [*self._joint.inputs, *self._cotangents, *known]
        start = len(inputs) - len(known)
        codes = {start + i: v for i, v in find_codes(self.known_values, known).items()}
        compiled = compile_backward(
            self._joint,
            inputs,
            self.output_nodes,
            self,
            form=BackwardInputs(codes=codes),
            compiler=self.compiler,
        )
        mark_kept_apart(compiled.module, self._of.prevent_cse)
        return compiled


class BatchedProgram(Program):
    """A program mapped over an axis: the outputs and the residuals of the program below.

    It saves nothing but the inputs of its body: a value known of each example is of no use to the
    batch.
    """

    def __init__(self, of: Program, specs: tuple[InputSpec, ...], axis: VmapAxis) -> None:
        region = of.region
        num_body = len(region.specs)
        body = BatchedBody(
            region.body, axis.in_dims[:num_body], axis.size, axis.randomness, axis.name
        )
        options = TraceOptions(True, opens_calls=region.options.opens_calls)
        batched = Region(body, specs[:num_body], region.names, region.paths, options)
        super().__init__(batched, of.policy, compiler=of.compiler)
        self.num_inputs = len(specs)
        self.saved_inputs = tuple(range(num_body))
        whole = BatchedBody(
            GraphBody(of.forward.module), axis.in_dims, axis.size, axis.randomness, axis.name
        )
        self._whole = Region.trace(
            whole,
            [replace(spec, requires_grad=False) for spec in specs],
            [f"input_{i}" for i in range(len(specs))],
            region.paths,
            TraceOptions(False),
        )
        self.out_dims = whole.out_dims

    @cached_property
    def output_nodes(self) -> tuple[fx.Node, ...]:
        return self._whole.joint.outputs

    @cached_property
    def discrete(self) -> tuple[int, ...]:
        """Also the residuals, of which a derivative of this program knows nothing."""
        with_tangent = floating_outputs(self)
        return tuple(i for i in range(self.num_outputs) if i not in with_tangent)

    @cached_property
    def forward(self) -> CompiledGraph:
        joint = self._whole.joint
        module = slice_graph(joint.module, joint.inputs, joint.outputs, always_run=draws_in_forward)
        return CompiledGraph.of(module, "batched", compiler=self.compiler)
