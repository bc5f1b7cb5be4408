"""A digest is taken from the installer's record only for a file that is as it was installed; the key stays what it was."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachepipe.runtime import backports
from cachepipe.runtime.recorded_digest import recorded_digest

DATA = os.urandom(3 << 20)
CACHE = """
import functools, hashlib, os

reads = []

@functools.lru_cache()
def triton_key():
    folder, found = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), []
    for name in ("runtime/cache.py", "language.py"):
        with open(os.path.join(folder, name), "rb") as file:
            found.append(hashlib.sha256(file.read()).hexdigest())
    whole = hashlib.sha256()
    with open(os.path.join(folder, "_C", "libtriton.so"), "rb") as file:
        reads.append(type(file).__name__)
        while True:
            chunk = file.read(1024**2)
            if not chunk:
                break
            whole.update(chunk)
    return "-".join([*found, whole.hexdigest()])
"""


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a package of Triton's form, installed by an installer that keeps a record."""
    package, info = tmp_path / "triton", tmp_path / "triton-3.6.0.dist-info"
    for folder in (package / "runtime", package / "_C", info):
        folder.mkdir(parents=True)
    (package / "runtime" / "cache.py").write_text(CACHE)
    (package / "language.py").write_text("x = 1\n")
    (package / "_C" / "libtriton.so").write_bytes(DATA)
    row = f"triton/_C/libtriton.so,sha256={encoded(DATA)},{len(DATA)}\n"
    (info / "RECORD").write_text(f"triton/language.py,sha256=abc,6\n{row}triton-3.6.0.dist-info/RECORD,,\n")
    return tmp_path


def library(site: Path) -> Path:
    return site / "triton" / "_C" / "libtriton.so"


def loaded(site: Path) -> types.ModuleType:
    path = site / "triton" / "runtime" / "cache.py"
    module = types.ModuleType("triton.runtime.cache")
    module.__file__ = str(path)
    exec(compile(path.read_text(), path, "exec"), vars(module))
    return module


def patched(site: Path) -> types.ModuleType:
    module = loaded(site)
    backports._take_recorded_digest(module, "/restored")
    return module


def test_the_key_is_the_same_and_the_library_is_not_read(site: Path) -> None:
    plain, quick = loaded(site), patched(site)
    before = dict(vars(quick))
    assert quick.triton_key() == plain.triton_key() == quick.triton_key()
    assert (plain.reads, quick.reads) == (["BufferedReader"], ["_Known"])
    assert {name: value for name, value in vars(quick).items() if name != "reads"} == {
        name: value for name, value in before.items() if name != "reads"
    }, "what the module sees is as before"


def test_every_other_file_of_the_key_is_read_as_ever(site: Path) -> None:
    before = patched(site).triton_key()
    (site / "triton" / "language.py").write_text("x = 2\n")
    assert patched(site).triton_key() not in (before, "") and patched(site).triton_key() == loaded(site).triton_key()


def younger(site: Path) -> None:
    facts = (site / "triton-3.6.0.dist-info" / "RECORD").stat()
    os.utime(library(site), ns=(facts.st_mtime_ns, facts.st_mtime_ns + 1))


def grown(site: Path) -> None:
    library(site).write_bytes(DATA + b"x")
    os.utime(library(site), (1, 1))


def rewritten(old: str, new: str) -> Callable[[Path], None]:
    def change(site: Path) -> None:
        record = site / "triton-3.6.0.dist-info" / "RECORD"
        record.write_text(record.read_text().replace(old, new))

    return change


def second_record(site: Path) -> None:
    (site / "triton-3.5.0.dist-info").mkdir()
    (site / "triton-3.5.0.dist-info" / "RECORD").write_text("")


def no_record(site: Path) -> None:
    (site / "triton-3.6.0.dist-info" / "RECORD").unlink()


def no_text(site: Path) -> None:
    (site / "triton-3.6.0.dist-info" / "RECORD").write_bytes(b"triton/_C/libtriton.so,\xff\n")


def twice(site: Path) -> None:
    record = site / "triton-3.6.0.dist-info" / "RECORD"
    record.write_text(record.read_text() * 2)


CHANGES = {
    "younger than its record": younger,
    "of another size": grown,
    "not in the record": rewritten("libtriton.so,", "other.so,"),
    "without a digest": rewritten(f"sha256={encoded(DATA)}", ""),
    "with another kind of digest": rewritten("sha256=", "sha512="),
    "with half a digest": rewritten(encoded(DATA), encoded(DATA)[:20]),
    "with a digest that is none": rewritten(encoded(DATA), "(no)"),
    "recorded twice": twice,
    "of two installations": second_record,
    "without a record": no_record,
    "with a record that is no text": no_text,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_library_that_may_not_be_what_was_installed_is_read_whole(site: Path, change: Callable[[Path], None]) -> None:
    assert recorded_digest(str(library(site)), "triton") == hashlib.sha256(DATA).hexdigest()
    change(site)
    assert recorded_digest(str(library(site)), "triton") is None
    quick, plain = patched(site), loaded(site)
    assert quick.triton_key() == plain.triton_key()
    assert quick.reads == ["BufferedReader"]


def test_without_the_library_the_key_fails_as_ever(site: Path) -> None:
    library(site).unlink()
    with pytest.raises(FileNotFoundError):
        patched(site).triton_key()


def test_a_key_that_fails_fails_as_ever_and_leaves_the_module_as_it_was(site: Path) -> None:
    module = patched(site)
    before = dict(vars(module))
    (site / "triton" / "language.py").unlink()
    with pytest.raises(FileNotFoundError):
        module.triton_key()
    assert vars(module) == {**before, "reads": module.reads}


@pytest.mark.parametrize(
    "line",
    [
        "hashlib.file_digest(open(__file__, 'rb'), 'md5')",
        "open(__file__, mode='rb').close()",
        "hashlib.sha256().block_size",
    ],
)
def test_a_key_that_wants_more_of_python_than_there_is_for_it_is_made_as_ever(site: Path, line: str) -> None:
    path = site / "triton" / "runtime" / "cache.py"
    path.write_text(path.read_text().replace("    whole = hashlib", f"    {line}\n    whole = hashlib"))
    assert patched(site).triton_key() == loaded(site).triton_key()


def test_threads_that_ask_at_once_all_get_the_key(site: Path) -> None:
    wanted = loaded(site).triton_key()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            quick = patched(site)
            assert set(pool.map(lambda _, ask=quick.triton_key: ask(), range(8))) == {wanted}


def test_a_site_below_a_folder_of_the_same_name_is_found(site: Path) -> None:
    below = site / "triton" / "venv"
    shutil.copytree(site, below, ignore=shutil.ignore_patterns("venv"))
    os.utime(library(below), (1, 1))
    assert recorded_digest(str(library(below)), "triton") == hashlib.sha256(DATA).hexdigest()
