"""Text that others chose, as text that a terminal, a log, a table, Markdown, XML or a page only shows.

Manifests, evidence, stores and models name things; a name may hold what a terminal obeys (ESC, C1), what turns the reading
direction round, what no XML may hold, or a line break that begins a row of its own. Every such character is escaped as Python
writes it, so that it is seen: `\\x1b`, `\\u202e`, `\\n`. Markup is the concern of each form, after this.
"""

from __future__ import annotations

import json

from cachepipe.domain.record import Json

BRIEF_CHARS = 300
"""Of what a table, Markdown, the page and stderr show of an error; JSON and JUnit XML have all."""


def printable(text: str) -> str:
    r"""Returns the text on one line, every character that is not printable escaped.

    >>> print(printable("a\x1b[2J\u202e b\n"))
    a\x1b[2J\u202e b\n
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def one_line(text: str) -> str:
    """Returns the text on one line as a cell shows it: white space of any kind is one space, all else as `printable`."""
    return printable(" ".join(text.split()))


def brief(text: str) -> str:
    """Returns the text on one line, cut: an error of torch may quote a compiler's command line of thousands of characters."""
    line = one_line(text)
    return line if len(line) <= BRIEF_CHARS else f"{line[:BRIEF_CHARS]}…"


def printable_json(tree: Json, is_ascii: bool = False) -> str:
    """Returns a document for people and machines, sorted and indented: what is not printable stands as JSON's own escape,
    with `is_ascii` all that is not ASCII, for a stream that takes nothing else.

    Raises:
        ValueError: the tree holds NaN or an infinity.
    """
    text = json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=is_ascii, allow_nan=False)
    return "\n".join(line if line.isprintable() else "".join(map(_json_char, line)) for line in text.split("\n"))


def _json_char(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]
