"""Sphinx builds the site from these pages: ``sphinx-build -W --keep-going -n -j 2 docs build/site``.

Nothing is fetched: there is no intersphinx, and links to other sites are not followed. Pages with ``{code-cell}`` are
notebooks, which run in folders of their own while the site is built. The pictures are drawn by ``pictures.py``.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import myst_nb.core.render  # noqa: E402
import pictures  # noqa: E402 - beside this file

import scidata  # noqa: E402
from tests.docs.blocks import is_notebook  # noqa: E402
from tests.docs.environment import hidden_modules  # noqa: E402

project = "scidata"
author = copyright = "the authors of scidata"
release = scidata.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc"]
exclude_patterns = ["_generated"]

html_theme = "furo"
html_title = "scidata"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sourcelink = False
html_copy_source = False

# -- pages and notebooks -------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True


_WORKING = re.compile(r"^[a-z ]+: (\d+ of \d+[^\n]*, )?\d+ s\n", re.MULTILINE)  # of commands, on a busy machine


def _joined(outputs: list[Any]) -> list[Any]:
    """Join what a cell prints, which comes in pieces of 100 bytes; MyST-NB's own way begins a line at each."""
    printed: dict[str, Any] = {}
    others = []
    for output in outputs:
        if output["output_type"] == "stream" and output["name"] == "stderr":
            output["text"] = _WORKING.sub("", output["text"])
            if not output["text"]:
                continue
        if output["output_type"] != "stream":
            others.append(output)
        elif output["name"] in printed:
            printed[output["name"]]["text"] += output["text"]
        else:
            printed[output["name"]] = output
    return [printed[name] for name in ("stdout", "stderr") if name in printed] + others


myst_nb.core.render.coalesce_streams = _joined

# what cells start finds this checkout, and the torchrun of this environment; threads of one rank are one
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE / "_environment"), str(ROOT), os.environ.get("PYTHONPATH", "")]
).rstrip(os.pathsep)
os.environ |= {
    "TERM": "dumb",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "110",
    "TTY_COMPATIBLE": "0",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}

# -- the reference -------------------------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say types in words; annotations of torch have nowhere to link to
autodoc_preserve_defaults = True
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
suppress_warnings = ["myst.header"]  # pages that programs write have their own levels
nitpick_ignore_regex = [
    ("py:.*", r"scidata\.(core|device_mesh|loader|shard|store)\..*"),  # modules inside, which have no page
    ("py:.*", r"(torch|numpy|np|npt|collections|typing|fsspec|xarray|datetime|os|contextlib)\..*"),
]

# -- what lies outside this folder ---------------------------------------------------------------------------------

#: Files of the repository that the pages link to so that the links work on GitHub too, and the page that shows them.
_SHOWN_BY = {
    "README.md": "index.md",
    "scidata/shard/README.md": "reference/shard_ops.md",
    "tests/bench/README.md": "reference/measured.md",
    "examples/README.md": "howto/examples.md",
    "pipelines/README.md": "howto/pipelines.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs": "index.md",
    "docs/decisions": "decisions/index.md",
}
_LINK = re.compile(r"\]\((?!https?:|mailto:|#|<)([^()\s#]+)(#[^()\s]*)?\)")


def _retarget(text: str, folder: Path, page: Path) -> str:
    """Point relative links of a text that lies in ``folder`` at what the site has, seen from ``page``."""

    def link(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        where = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
        if where in _SHOWN_BY:
            target = HERE / _SHOWN_BY[where]
        elif not target.is_relative_to(HERE):
            return f"]({os.path.relpath(target, page.parent)})"  # a file: downloaded
        anchor = found[2] or ""
        return f"]({os.path.relpath(target, page.parent)}{anchor})"

    return _LINK.sub(link, text)


def _on_source(app: Any, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    if page.suffix != ".md":
        return
    if is_notebook(source[0]):  # what its kernel finds: MyST-NB starts it next
        os.environ["SCIDATA_PAGE_LACKS"] = " ".join(hidden_modules(source[0], notebook=True))
    text = _retarget(source[0], page.parent, page)

    def shown(found: re.Match[str]) -> str:
        file = ROOT / found[1]
        return _retarget(file.read_text(encoding="utf-8"), file.parent, page)

    if "<!-- shows the help of every command -->" in text:
        text = text.replace("<!-- shows the help of every command -->", _help())
    source[0] = re.sub(r"^\[(\S+)\]\(\S+\) <!-- shown here by the site -->$", shown, text, flags=re.M)


def _help() -> str:
    """Return what ``scidata`` and each command say about themselves, as Markdown."""
    from typer.testing import CliRunner

    from scidata.cli.app import app

    names = [command.name or command.callback.__name__ for command in app.registered_commands if not command.hidden]
    parts = []
    for name in ["", *names]:
        words = [name, "--help"] if name else ["--help"]
        text = CliRunner().invoke(app, words, prog_name="scidata", env={"TERMINAL_WIDTH": "100"}).output
        lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
        parts.append(f"## scidata {name}".rstrip() + f"\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


def _on_signature(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str] | None:
    """Leave out the constructor of a class that documents no parameters: scidata makes its instances, not the user."""
    return ("", "") if what == "class" and "Parameters\n" not in (inspect.getdoc(thing) or "") else None


def setup(app: Any) -> dict[str, bool]:
    """Draw the pictures, and register the functions that Sphinx calls."""
    pictures.draw_all(HERE / "_generated")
    app.connect("autodoc-process-signature", _on_signature)
    app.connect("source-read", _on_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
