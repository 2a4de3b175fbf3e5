"""Pictures: where the memory of a training step goes, and what a policy or a budget changes.
A plan, a report or a graph becomes data in `picture/`, then shapes in `figure/` or a page of
`assets/`. It uses plans and reports, and no compiler. Begin with `page.py`.

`graph_html` draws the forward and backward graph of a plan as one page that opens offline, with the
bytes alive over the step under it. `diff_html` draws two of them side by side; `timeline` and
`pareto` draw figures. The exports pass the graph to other tools.

>>> import tempfile, torch, torchremat as tr
>>> from torchremat import viz
>>> found = tr.plan(lambda x: x.sin().cos().sum(), torch.ones(64), budget="100%")
>>> with tempfile.TemporaryDirectory() as folder:
...     viz.graph_html(found, folder + "/plan.html").name
'plan.html'
"""

from torchremat.viz.exports import to_dot, to_json, to_model_explorer, to_perfetto
from torchremat.viz.page import diff_html, graph_html
from torchremat.viz.pareto_figure import pareto
from torchremat.viz.timeline_figure import timeline

__all__ = [
    "diff_html",
    "graph_html",
    "pareto",
    "timeline",
    "to_dot",
    "to_json",
    "to_model_explorer",
    "to_perfetto",
]


def __dir__() -> list[str]:
    return sorted(__all__)
