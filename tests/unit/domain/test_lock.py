"""Lock files: what is none is refused, and the hint says how to get one."""

from __future__ import annotations

import pytest

from cachepipe.domain.lock import FORMAT, Lock, lock_bytes, read_lock
from cachepipe.errors import IntegrityError


@pytest.mark.parametrize("data", [b"", b"not json", b"[]", b'{"format":1}', b"\xff\xfe"])
def test_what_is_no_lock_file_says_how_to_write_one(data: bytes) -> None:
    with pytest.raises(IntegrityError) as caught:
        read_lock(data)
    assert caught.value.exit_code == 13 and "cachepipe lock" in str(caught.value.hint)


def test_a_lock_file_of_another_format_is_refused_with_both_numbers() -> None:
    data = lock_bytes(Lock(FORMAT + 1, "demo", "stable", 1, ()))
    with pytest.raises(IntegrityError, match=f"wanted {FORMAT}, found {FORMAT + 1}"):
        read_lock(data)
