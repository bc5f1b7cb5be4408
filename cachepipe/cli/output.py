"""What commands print: JSON documents and tables on stdout, talk on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click

from cachepipe.domain.printable import one_line, printable, printable_json
from cachepipe.domain.record import Json, finite, to_json

PIPE_WIDTH = 200
"""Columns of a table that no terminal bounds: wide enough that `grep` sees whole rows."""
MIN_COLUMN = 12
"""Characters per column below which a table is read field by field instead."""


def print_json(document: Json) -> None:
    """Prints one JSON document, sorted and indented, on stdout; a number that JSON does not have is null."""
    click.echo(printable_json(finite(to_json(document))))


def say(text: str) -> None:
    """Prints one line of talk on stderr."""
    click.echo(printable(text), err=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table on stdout; a column whose name begins with `>` is aligned to the right.

    Cells are plain text: nothing in them is taken for markup or obeyed by a terminal, and colour carries no meaning. Where a
    terminal is too narrow for columns, each row becomes a block with one line per field.
    """
    from rich.console import Console  # 0.1 s that commands without a table need not pay
    from rich.table import Table
    from rich.text import Text

    names = [column.lstrip(">") for column in columns]
    cells = [[_cell(cell) for cell in row] for row in rows]
    is_terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if is_terminal else PIPE_WIDTH, highlight=False, soft_wrap=False)
    heading = [printable(line) for line in title.split("\n")] if title else []
    if _is_narrow(names, cells, console.width):
        print_lines([*heading, *_stacked(names, cells)])
        return
    table = Table(
        title=Text("\n".join(heading), style="bold") if title else None, title_justify="left", box=None, pad_edge=False
    )
    for column, name in zip(columns, names, strict=True):
        table.add_column(Text(name), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _is_narrow(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Returns whether columns would be so thin that words are cut: what does not fit gets a fair share of the width."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return sum(widths) + 2 * len(widths) > width and width < MIN_COLUMN * len(widths)


def _stacked(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Returns the lines of each row, `name: value` for every field that has one, and an empty line between rows."""
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield from (f"{name}: {cell}" for name, cell in zip(names, row, strict=True) if cell not in ("", "–"))


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines on stdout; what a terminal would obey is escaped, a line break inside of one as well."""
    for line in lines:
        click.echo(printable(line))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else one_line(str(value))
