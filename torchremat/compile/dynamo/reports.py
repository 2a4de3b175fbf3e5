"""Reports of graphs that `torch.compile` cut, with the rows of `explain`."""

from torch import fx

from torchremat.compile.dynamo.partition import Partition
from torchremat.core.avals import Aval
from torchremat.remat.program.decisions import Decision, Outcome
from torchremat.remat.program.random_replay import state_aval
from torchremat.remat.values.scope import Scope, ScopedValue, is_computed, is_tensor
from torchremat.remat.values.value_labels import ValueLabels
from torchremat.report.report import Report
from torchremat.report.report_rows import Row
from torchremat.tracing.modules.module_paths import ModulePaths


def build_report(partition: Partition) -> Report:
    """Build the report of a graph: a row for each saved or recomputed value, in order."""
    joint = partition.joint
    scope = Scope(list(joint.module.graph.nodes), joint.inputs, (), ModulePaths({}))
    labels = ValueLabels.of(scope)
    rows = [_input_row(node) for node in partition.residuals.inputs if is_tensor(node)]
    for node in scope.nodes:
        if node in partition.saved and is_tensor(node):
            rows.append(_row(ScopedValue(node, scope), labels, _decision(partition, node, "saved")))
        elif node in partition.residuals.recomputed and is_computed(node):
            rows.append(
                _row(ScopedValue(node, scope), labels, _decision(partition, node, "recomputed"))
            )
        elif node in partition.replayed_random:
            rows.append(_state_row(ScopedValue(node, scope), labels))
    return Report(tuple(rows))


def _state_row(value: ScopedValue, labels: ValueLabels) -> Row:
    made = Decision("saved", "the state of the generator, from which it is drawn again")
    return _row(value, labels, made, state_aval(value.node))


def _decision(partition: Partition, node: fx.Node, decision: Outcome) -> Decision:
    made = partition.decisions.by_value.get(node)
    return Decision(decision, made.reason if made else str(partition.decisions.policy))


def _row(value: ScopedValue, labels: ValueLabels, made: Decision, aval: Aval | None = None) -> Row:
    label = labels.label_of(value)
    aval = aval or Aval.of(value.node.meta["val"])
    return Row(label.name, value.op, label.module, label.source, aval.shape, aval.dtype,
               aval.nbytes, made.outcome, made.reason)  # fmt: skip


def _input_row(node: fx.Node) -> Row:
    aval = Aval.of(node.meta["val"])
    return Row(node.name, "", "", None, aval.shape, aval.dtype, aval.nbytes, "input",
               "an argument, a parameter or a buffer")  # fmt: skip
