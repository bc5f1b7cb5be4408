"""Files outside of the cache folder: whose they are, and that a home full of other people's files is not our finding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachepipe.adapters.outside import OutsideWatch, kind_sizes, owner_of

WATCH = """
import os, subprocess, sys
from cachepipe.adapters.outside import OutsideWatch
base = sys.argv[1]
root = os.path.join(base, "root")
watch = OutsideWatch(root, {"HOME": os.path.join(base, "home")}, (os.path.join(base, "result"),))
watch.begin()
def write(path, text="x"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
write(os.path.join(root, "inductor", "a.py"))
write(os.path.join(base, "result"))
write(os.path.join(base, "home", "old"), "changed")
write(os.path.join(base, "elsewhere", "by-python"))
with open(os.path.join(base, "home", "read-only")) as file:
    file.read()
subprocess.run(["sh", "-c", f"echo x > {base}/home/by-child; echo x > {base}/unseen"], check=True)
print("\\n".join(os.path.relpath(row.path, base) for row in watch.found()))
assert watch.found() == ()
"""


def test_what_python_opens_and_what_appears_in_the_home_is_found_and_nothing_of_ours(tmp_path: Path) -> None:
    for name in ("root", "home", "tmp"):
        (tmp_path / name).mkdir()
    for name in ("old", "read-only", "untouched"):
        (tmp_path / "home" / name).write_text("before")
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    words = [sys.executable, "-B", "-c", WATCH, str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["elsewhere/by-python", "home/by-child", "home/old"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/home/app/.nv/ComputeCache/1/a", "CUDA driver"),
        ("/home/x/.triton/cache/k/k.json", "Triton"),
        ("/tmp/torchinductor_root/precompiled_headers/h.gch", "precompiled headers"),
        ("/tmp/torchinductor_root/ab/cab.py", "TORCHINDUCTOR_CACHE_DIR"),
        ("/home/app/.cache/huggingface/hub/x", "Hugging Face"),
        ("/srv/notes.txt", "unknown"),
    ],
)
def test_a_cache_is_known_by_its_place(path: str, words: str) -> None:
    assert words in owner_of(path)


def test_a_watch_that_never_began_finds_nothing(tmp_path: Path) -> None:
    assert OutsideWatch(str(tmp_path), {}).found() == ()


def test_sizes_by_kind_leave_locks_out(tmp_path: Path) -> None:
    for name, data in (
        ("inductor/ab/cab.so", b"123"),
        ("inductor/locks/x.lock", b"1"),
        ("triton/0/k/k.cubin", b"12345"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = {kind: (size.files, size.size_bytes) for kind, size in kind_sizes(str(tmp_path)).items()}
    assert found == {"native": (1, 3), "triton": (1, 5)}
    assert kind_sizes(str(tmp_path / "absent")) == {}
