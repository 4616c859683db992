"""Sphinx configuration; `nox -s docs` builds with warnings as errors."""

from __future__ import annotations

from importlib.metadata import version as installed_version

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
