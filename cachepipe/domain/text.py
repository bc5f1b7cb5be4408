"""Text of others (manifests, stores, models' output) as a terminal may show it."""

from __future__ import annotations

import re

_ESCAPED = re.compile(r"[^\n -~]")


def printable(text: str) -> str:
    """Returns one line in which nothing is left that a terminal obeys: what is not printable is escaped.

    That is: control characters (C0, C1, line ends), directions of writing and other invisible marks, blanks that are no
    spaces, and bytes that were no UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable_json(document: str) -> str:
    r"""Returns a JSON text with the same meaning in which such characters stand as `\uXXXX`; its own line ends stay."""
    return _ESCAPED.sub(lambda found: found[0] if found[0].isprintable() else _units(found[0]), document)


def _units(char: str) -> str:
    data = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at]:02x}{data[at + 1]:02x}" for at in range(0, len(data), 2))
