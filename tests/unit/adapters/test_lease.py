from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachepipe.adapters.lease import Lease, lock_file
from cachepipe.errors import DeadlineError, UnsafePathError


def test_many_share_a_lease_and_one_excludes_all(tmp_path: Path) -> None:
    one, two = (Lease.take(str(tmp_path), is_shared=True) for _ in range(2))
    assert one is not None
    assert two is not None
    assert Lease.take(str(tmp_path), is_shared=False) is None
    assert not Lease.is_free(str(tmp_path))
    one.close()
    two.close()
    assert Lease.is_free(str(tmp_path))
    whole = Lease.take(str(tmp_path), is_shared=False)
    assert whole is not None
    assert Lease.take(str(tmp_path), is_shared=True) is None
    whole.close()


def test_a_lease_is_held_over_exec_and_free_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom cachepipe.adapters.lease import Lease\n"
        f"lease = Lease.take({str(tmp_path)!r}, is_shared=True)\nlease.make_inheritable()\n"
        "os.execv('/bin/sh', ['sh', '-c', 'echo ready; read line'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"ready\n"
        assert Lease.take(str(tmp_path), is_shared=False) is None
        service.kill()
        service.wait()
    assert Lease.is_free(str(tmp_path))


def test_a_folder_that_was_renamed_aside_cannot_be_leased_under_its_old_name(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    lease = Lease.take(str(folder), is_shared=True)
    folder.rename(tmp_path / "aside")
    assert Lease.take(str(folder), is_shared=True) is None
    assert lease is not None
    lease.close()


@pytest.mark.parametrize("kind", ["link", "folder", "absent"])
def test_a_lease_that_is_no_file_is_not_taken(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "demo"
    if kind != "absent":
        folder.mkdir()
    if kind == "link":
        (folder / ".lease").symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        (folder / ".lease").mkdir()
    assert Lease.take(str(folder), is_shared=True) is None
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_file_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    handle = lock_file(path, time.monotonic() + 5)
    with pytest.raises(DeadlineError, match="until the deadline"):
        lock_file(path, time.monotonic() + 0.05)
    os.close(handle)
    os.close(lock_file(path, time.monotonic() + 5))


def test_a_lock_file_is_not_followed_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError):
        lock_file(str(tmp_path / "lock"), time.monotonic() + 1)
    assert not (tmp_path / "elsewhere").exists()
