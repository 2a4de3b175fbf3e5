"""`config.verify_recomputation`: check that recomputed values are equal to the first ones.

Under `"bitwise"` a checkpoint also saves every value that its backward pass recomputes, and
compares. That takes the memory that the checkpoint frees, so it serves to look for a fault.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchremat.autodiff.replay_rules import has_gaps
from torchremat.errors import RecomputationError
from torchremat.graph.codegen import compile_graph, symbols_of
from torchremat.graph.nodes import call_of, is_forward, is_item, is_view, item_index
from torchremat.graph.notes import notes_of
from torchremat.graph.slicing import slice_graph
from torchremat.policies.policy import Policy
from torchremat.remat.program.compiled_graph import CompiledGraph, accept_any_layout
from torchremat.remat.program.function_program import FunctionProgram
from torchremat.remat.program.region import Mask, Region
from torchremat.remat.tape.checksum import same_bits


class VerifyingProgram(FunctionProgram):
    """A program that saves all that it recomputes, and compares bit by bit.

    It does so under plain autograd, for first derivatives. Under `torch.func` it compares nothing.
    """

    stages = ()
    may_have_stages = may_run_again = False
    why_none_offloaded = "config.verify_recomputation keeps everything on its device"

    def __init__(self, region: Region, policy: Policy, **options: Any) -> None:
        super().__init__(region, policy, **options)
        self.checked = tuple(
            node
            for node in self.root_joint.module.graph.nodes
            if node in self.recomputed
            and not is_view(node)
            and isinstance(node.meta.get("val"), Tensor)
            and not (is_item(node) and has_gaps(call_of(node).target, item_index(node)))
        )
        """The values that the backward pass recomputes, in program order."""
        self.residuals = (*self.checked, *self.residuals)
        self.replayed_random = self.offloaded = ()
        self.written_residuals = ()

    def _compile_backward(
        self, outputs_with_cotangent: Mask, inputs_needing_grad: Mask, with_states: bool
    ) -> CompiledGraph:
        if self.joint_for(outputs_with_cotangent) is not self.root_joint:
            return super()._compile_backward(
                outputs_with_cotangent, inputs_needing_grad, with_states
            )
        joint = self.root_joint
        cotangents = [ct for ct in joint.cotangents if ct is not None]
        saved = [joint.inputs[i] for i in self.saved_inputs]
        inputs = [*saved, *self.residuals[len(self.checked) :], *cotangents]
        grads = self.gradients_of(joint, inputs_needing_grad)
        module = slice_graph(joint.module, inputs, [*grads, *self.checked], lazy=is_forward)
        accept_any_layout(module.graph)
        run = compile_graph(module, "verified backward")
        symbols = symbols_of(run)
        start, count = len(symbols) + len(saved), len(self.checked)

        def run_and_compare(values: list[Any]) -> tuple[Any, ...]:
            expected = values[start : start + count]
            del values[start : start + count]
            results = run(values)
            self._compare(expected, results[len(grads) :])
            return results[: len(grads)]

        run_and_compare.symbols = symbols  # type: ignore[attr-defined]
        return CompiledGraph.around(module, run_and_compare)

    def _compare(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        for node, before, again in zip(self.checked, expected, found, strict=True):
            if not same_bits(before, again):
                differing = int((before != again).sum())
                module = notes_of(node).module or "(none)"
                raise RecomputationError(
                    f"{node.name} ({node.target}), in module {module!r} from "
                    f"{notes_of(node).source}, was not the same when it was recomputed: "
                    f"{differing} of {before.numel()} elements of {tuple(before.shape)} differ. "
                    "Its operator does not give the same value twice, or something wrote to what "
                    "it reads. Let a policy save it (save_ops, save_modules, checkpoint_name)."
                )
