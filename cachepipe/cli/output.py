"""What commands print: JSON documents and tables on stdout, talk on stderr.

Nothing that a terminal obeys leaves here: what is printed quotes manifests, stores and models' output.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from cachepipe.cli.stdout import PLAIN
from cachepipe.domain.printable import one_line, printable, printable_json
from cachepipe.domain.record import Json, finite, to_json

PIPE_WIDTH = 200
"""Columns of a table that no terminal bounds: wide enough that `grep` sees whole rows."""
NARROW = 72
MIN_COLUMN = 12
"""Columns of a terminal, and of each field, below which a table that does not fit is printed cell by cell."""
_INDENT = "    "


def print_json(document: Json) -> None:
    """Prints one JSON document, sorted and indented, on stdout; a number that JSON does not have is null."""
    _write(f"{printable_json(finite(to_json(document)), is_ascii=not _takes_unicode())}\n")


def print_raw(text: str) -> None:
    """Prints a text of ours as it is, on stdout."""
    _write(f"{text}\n")


def print_line(line: str = "") -> None:
    """Prints one line on stdout."""
    print_lines([line])


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines on stdout; a terminal gets them broken between words, the rest indented."""
    width = terminal_width()
    for line in lines:
        text = _plain(printable(line))
        for piece in [text] if width is None or len(text) <= width else _broken(text, width):
            _write(f"{piece}\n")


def say(text: str) -> None:
    """Prints one line of talk on stderr; talk that nobody takes is no failure (`stdout.guard`)."""
    print(printable(text), file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table on stdout; a column whose name begins with `>` is aligned to the right.

    Cells are plain text: nothing in them is taken for markup, and colour carries no meaning. On a narrow terminal that the
    table does not fit, each row is a few lines: `column: cell`.
    """
    names = [column.lstrip(">") for column in columns]
    cells = [[_plain(printable(_cell(value))) for value in row] for row in rows]
    width = terminal_width()
    natural = sum(max(map(len, column)) + 1 for column in zip(names, *cells, strict=True))
    if width is not None and width < natural and width < max(NARROW, MIN_COLUMN * len(names)):
        _print_stacked(title, names, cells)
    else:
        _print_grid("\n".join(_plain(printable(line)) for line in title.split("\n")), columns, cells, width)


def _print_stacked(title: str, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    print_lines(title.split("\n") if title else [])
    for row in cells:
        shown = [f"{name}: {cell}" for name, cell in zip(names, row, strict=True) if cell]
        print_lines([f"- {shown[0]}", *(f"  {text}" for text in shown[1:])] if shown else [])


def _print_grid(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], width: int | None) -> None:
    from io import StringIO

    from rich.console import Console  # 0.1 s that commands without a table need not pay
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, style="bold") if title else None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(Text(column.lstrip(">")), justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    text = StringIO()
    is_styled = width is not None and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    console = Console(file=text, width=width or PIPE_WIDTH, highlight=False, soft_wrap=False, force_terminal=is_styled)
    console.print(table)
    _write(text.getvalue())


def terminal_width() -> int | None:
    """Returns the columns of the terminal that stdout is; None: it is none, and nothing bounds a line."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(20, shutil.get_terminal_size().columns)


def _broken(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    deeper = indent + _INDENT  # a digest stays whole: it is there to be copied
    return textwrap.wrap(line, width, subsequent_indent=deeper, break_on_hyphens=False, break_long_words=False) or [""]


def _takes_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("_", "-") in ("utf-8", "utf8")


def _plain(text: str) -> str:
    """Returns what the stream will show of a text, so that columns stay aligned."""
    if text.isascii() or _takes_unicode():
        return text
    encoding = sys.stdout.encoding
    return text.encode(encoding, PLAIN).decode(encoding)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else one_line(str(value))
