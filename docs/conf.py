"""How the documentation is built: `scripts/docs.sh`."""

import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "torchremat"
author = "the torchremat authors"
copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    # of our own, in _ext
    "command_help",
    "docstring_code",
    "math_ml",
    "public_links",
]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [
    # nothing is fetched while building, so what others document has no address
    ("py:.*", r"(?:_?torch|nn|fx|typing|collections|contextlib|os|numbers|click|optim)(?:\..*)?"),
    ("py:.*", r"(?:inspect\.Parameter|pathlib\.Path|DeviceMesh|Placement|Tensor|Any|Callable)"),
    # type variables, and classes that users only pass on
    ("py:.*", r"torchremat(?:\.\w+)+\.(?:T|AnyModule|EltTy|GraphSchedule|Joint|Structure)"),
    ("py:.*", r"torchremat(?:\.\w+)+\.(?:FailedOperator|NodeTimer|OpSignature|Order|SizeVar)"),
    ("py:.*", r"torchremat(?:\.\w+)+\.(?:Transposed|Var)"),
    ("py:.*", r"tuple\[.*"),  # Sphinx splits it at the comma
]

# --- pages ---------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath", "attrs_inline"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# --- reference -----------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "inherited-members": False}
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

html_math_renderer = "mathml"
highlight_language = "none"  # what is printed is not Python

# --- looks ---------------------------------------------------------------------------------------

html_theme = "furo"
html_title = "torchremat"
html_static_path = ["_static"]
html_css_files = ["torchremat.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c8a", "color-brand-content": "#0b5c8a"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}


def setup(app: object) -> None:
    """Let the globs of the indexes find nothing; Sphinx has no name for that warning."""
    log = logging.getLogger("sphinx.sphinx.directives.other")
    log.addFilter(lambda record: "glob pattern" not in str(record.msg))
