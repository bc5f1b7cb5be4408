"""What commands print: JSON documents and tables on stdout, talk on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

import click

from cachepipe.domain.record import Json, to_json

PIPE_WIDTH = 200
"""Columns of a table that no terminal bounds: wide enough that `grep` sees whole rows."""


def print_json(document: Json) -> None:
    """Prints one JSON document, sorted and indented, on stdout."""
    click.echo(json.dumps(to_json(document), indent=2, sort_keys=True, ensure_ascii=False))


def say(text: str) -> None:
    """Prints one line of talk on stderr."""
    click.echo(text, err=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table on stdout; a column whose name begins with `>` is aligned to the right.

    Cells are plain text: nothing in them is taken for markup, and colour carries no meaning.
    """
    from rich.console import Console  # 0.1 s that commands without a table need not pay
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold") if title else None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(Text(column.lstrip(">")), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(cell)) for cell in row))
    is_terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if is_terminal else PIPE_WIDTH, highlight=False, soft_wrap=False)
    console.print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines on stdout."""
    for line in lines:
        click.echo(line)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
