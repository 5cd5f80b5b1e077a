"""Sphinx's settings for the site: ./run site. Nothing is loaded from elsewhere, and the search works from file:// as well."""
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import sources  # noqa: E402

project = "AMem"
author = "the AMem authors"
version = release = re.search(r"project\(amem VERSION ([0-9.]+)", sources.read("CMakeLists.txt")).group(1)
html_title = "AMem " + version
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a section of a README may begin with a heading of the third level
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["amem.css"]
html_show_sphinx = html_show_sourcelink = html_show_copyright = False
html_copy_source = False
highlight_language = "text"
nitpicky = True


def setup(app):
    def expanded(_app, document, text):
        text[0] = sources.expand(sources.PAGES + "/" + document + ".md")
    app.connect("source-read", expanded)
