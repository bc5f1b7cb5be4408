"""Names of artifacts: 48 bits of time and 80 random bits in 26 characters, so that names sort by age and never repeat.

Source: ulid/spec, README (Crockford's base 32, upper case).
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ULID = re.compile(f"[0-7][{_ALPHABET}]{{25}}", re.ASCII)


def ulid(now: datetime, randomness: bytes) -> str:
    """Returns the name for this millisecond and ten random bytes; later milliseconds sort after earlier ones."""
    if len(randomness) != 10:
        raise ValueError("a ULID takes ten random bytes")
    number = ((now - _EPOCH) // timedelta(milliseconds=1)) << 80 | int.from_bytes(randomness, "big")
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def is_ulid(text: str) -> bool:
    return _ULID.fullmatch(text) is not None
