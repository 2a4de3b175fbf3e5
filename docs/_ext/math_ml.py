"""Mathematics as MathML, which browsers draw themselves: nothing is fetched, no script runs.

`html_math_renderer = "mathml"`; the formulas are translated by docutils.
"""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """A formula on lines of its own, which scrolls where it is too wide."""
    formula = tex2mathml(node.astext(), as_block=True)
    translator.body.append(f'<div class="math-block">{formula}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True}
