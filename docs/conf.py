"""Sphinx configuration; `nox -s docs` builds with warnings as errors."""

project = "minivllm"
author = "the minivllm authors"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
myst_heading_anchors = 3
