"""Renders one self-contained HTML page: style, script and data in one file, and a policy that lets nothing leave it.

The template escapes every value, after what is not printable was made visible; the only text that is not escaped is our own style and script, whose digest stands in the
page's content security policy.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from cachepipe.domain.printable import one_line


def render_page(page: Mapping[str, Any]) -> str:
    """Returns the page of a report.

    Args:
        page: plain values by the names that `templates/report.html.j2` uses (workflows/report_page.py makes them).
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files("cachepipe.adapters") / "templates"
    template, css, js = (
        (folder / name).read_text(encoding="utf-8") for name in ("report.html.j2", "report.css", "report.js")
    )
    digest = base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False, finalize=_shown)
    rendered: str = environment.from_string(template).render(
        page=page,
        css=Markup(css),  # noqa: S704 - files of this package
        js=Markup(js),  # noqa: S704
        script_hash=f"sha256-{digest}",
    )
    return rendered


def _shown(value: object) -> object:
    """Makes text of evidence visible; markup (our style, our script, what a macro gave) stays as it is."""
    return one_line(value) if type(value) is str else value
