"""Sphinx configuration; `nox -s docs` builds with warnings as errors."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib.metadata import version as installed_version
from typing import Any

from sphinx.application import Sphinx

project = "nostall"
author = "The nostall contributors"
copyright = author
version = release = installed_version("nostall")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"nostall {release}"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_js_files = ["narrow.js"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# torch's docstrings are not written for this build, and theirs is the place to read them.
autodoc_inherit_docstrings = False


def declared_signature(
    _app: Sphinx, what: str, _name: str, documented: Any, _options: Any, *_signature: str | None
) -> tuple[str, None] | None:
    """The parameters that a class declares to type checkers, if they are others than at run time.

    A protocol has none: nobody calls it.
    """
    of_nostall = getattr(documented, "__module__", "").startswith("nostall")
    if what != "class" or not (of_nostall and inspect.isclass(documented)):
        return None
    if getattr(documented, "_is_protocol", False):
        return "", None
    (class_,) = ast.parse(textwrap.dedent(inspect.getsource(documented))).body
    for block in ast.iter_child_nodes(class_):
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for each in block.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    each.args.args.pop(0)  # self
                    return f"({ast.unparse(each.args)})".replace("_torch.", ""), None
    return None


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-signature", declared_signature)
