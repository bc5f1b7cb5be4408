from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachepipe.adapters.materialise import fetching, materialise
from cachepipe.adapters.packs import Packed, open_blob, pack_tree, write_blob
from cachepipe.domain.artifact import read_table
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.record import sha256
from cachepipe.errors import DeadlineError, IntegrityError, NoRoomError, StoreError
from tests.support.restoring import files_below, tree_files, write_tree

ROOT = "/var/cache/cachepipe/demo"
SMALL = Limits(pack_raw_bytes=4096)


def pack(tree: Path, out: Path, limits: Limits = LIMITS, root: str = ROOT) -> Packed:
    out.mkdir(exist_ok=True)
    return pack_tree(tree, dict.fromkeys((str(p.relative_to(tree)) for p in tree.rglob("*")), (0,)), root, out, limits)


def unpack(packed: Packed, blobs: Path, target: Path, root: str = ROOT, limits: Limits = LIMITS) -> None:
    table = read_table(
        bytes(open_blob((blobs / packed.table_blob.digest).read_bytes(), packed.table_blob)), packed.packs, 1, limits
    )
    target.mkdir()
    materialise(
        lambda digest: (blobs / digest).read_bytes(),
        packed.packs,
        table,
        target,
        root,
        deadline=time.monotonic() + 30,
    )


def test_equal_trees_have_equal_digests_wherever_and_in_whatever_order_they_were_made(tmp_path: Path) -> None:
    files = {**tree_files(ROOT), "inductor/big.bin": os.urandom(20_000)}
    one = pack(write_tree(tmp_path / "one", files), tmp_path / "b1", SMALL)
    again = pack(tmp_path / "one", tmp_path / "b2", SMALL)
    other = pack(write_tree(tmp_path / "other name", dict(reversed(files.items()))), tmp_path / "b3", SMALL)
    assert one == again == other
    assert len(one.packs) > 3
    assert set(os.listdir(tmp_path / "b1")) == {blob.digest for blob in (*one.packs, one.table_blob)}


def test_another_byte_gives_another_digest(tmp_path: Path) -> None:
    one = pack(write_tree(tmp_path / "1", {"a": b"x"}), tmp_path / "b1")
    two = pack(write_tree(tmp_path / "2", {"a": b"y"}), tmp_path / "b2")
    assert one.packs != two.packs
    assert one.table_blob != two.table_blob


def test_case_a5_group_files_name_the_final_folder_and_other_finds_are_noted(tmp_path: Path) -> None:
    files = {**tree_files(ROOT), "inductor/ab/native.so": b"\0" + ROOT.encode() + b"/inductor\0"}
    packed = pack(write_tree(tmp_path / "tree", files), tmp_path / "blobs")
    assert packed.notes == (f"inductor/ab/native.so names {ROOT}",)
    (token_row,) = [row for row in packed.table.files if row.has_root_token]
    assert token_row.path == "triton/0/KEY0/__grp__k.json"
    elsewhere = '/elsewhere/"odd"'
    unpack(packed, tmp_path / "blobs", tmp_path / "out", elsewhere)
    text = (tmp_path / "out" / token_row.path).read_text()
    assert __import__("json").loads(text)["child_paths"]["k.cubin"] == f"{elsewhere}/triton/0/KEY0/k.cubin"
    assert ROOT not in text


def test_a_group_file_that_holds_the_token_before_packing_is_refused(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"triton/0/K/__grp__k.json": b'"@CACHEPIPE_ROOT@/x"'})
    with pytest.raises(IntegrityError, match="before it was packed"):
        pack(tree, tmp_path / "blobs")


def test_a_neighbour_folder_with_a_longer_name_is_not_the_root(tmp_path: Path) -> None:
    path = "triton/0/K/__grp__k.json"
    packed = pack(write_tree(tmp_path / "tree", {path: f'"{ROOT}-2/x"'.encode()}), tmp_path / "blobs")
    assert not packed.table.files[0].has_root_token


def test_a_path_that_no_restore_accepts_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="unsafe path"):
        pack(write_tree(tmp_path / "tree", {"a b": b""}), tmp_path / "blobs")


def test_files_without_an_entry_are_not_packed(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"a": b"a", "b": b"b"})
    (tmp_path / "blobs").mkdir()
    assert [row.path for row in pack_tree(tree, {"b": (0,)}, ROOT, tmp_path / "blobs").table.files] == ["b"]


def test_a_blob_larger_than_its_limit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="wanted <= 3 bytes, found 4"):
        write_blob(b"four", tmp_path, 3)
    assert not os.listdir(tmp_path)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", {"d/plain": b"a", "d/tool": b"b", "d/large": os.urandom(9000)})
    (tree / "d/tool").chmod(0o700)
    packed = pack(tree, tmp_path / "blobs", SMALL)
    old = os.umask(0o777)
    try:
        (tmp_path / "out").mkdir(mode=0o700)
        (tmp_path / "out").chmod(0o700)
        materialise(
            lambda digest: (tmp_path / "blobs" / digest).read_bytes(),
            packed.packs,
            packed.table,
            tmp_path / "out",
            ROOT,
            deadline=time.monotonic() + 30,
        )
    finally:
        os.umask(old)
    modes = {name: (tmp_path / "out/d" / name).stat().st_mode & 0o7777 for name in ("plain", "tool", "large")}
    assert modes == {"plain": 0o644, "tool": 0o755, "large": 0o644}
    assert (tmp_path / "out/d").stat().st_mode & 0o7777 == 0o700


def test_what_was_written_is_told_with_its_digest(tmp_path: Path) -> None:
    files = tree_files(ROOT)
    packed = pack(write_tree(tmp_path / "tree", files), tmp_path / "blobs")
    (tmp_path / "out").mkdir()
    written = materialise(
        lambda digest: (tmp_path / "blobs" / digest).read_bytes(),
        packed.packs,
        packed.table,
        tmp_path / "out",
        "/final",
        deadline=time.monotonic() + 30,
    )
    for row in written:
        data = (tmp_path / "out" / row.path).read_bytes()
        facts = (tmp_path / "out" / row.path).stat()
        assert (row.sha256, row.size_bytes) == (sha256(data), len(data))
        assert (row.mtime_ns, row.inode) == (facts.st_mtime_ns, facts.st_ino)
    assert {row.path for row in written} == set(files)


def test_a_pack_that_is_damaged_twice_is_read_again(tmp_path: Path) -> None:
    files = tree_files(ROOT)
    packed = pack(write_tree(tmp_path / "tree", files), tmp_path / "blobs")
    tries: list[str] = []

    def fetch(digest: str) -> bytes:
        tries.append(digest)
        if len(tries) == 1:
            raise StoreError("reset by peer")
        return (tmp_path / "blobs" / digest).read_bytes()[: -1 if len(tries) == 2 else None]

    (tmp_path / "out").mkdir()
    materialise(fetch, packed.packs, packed.table, tmp_path / "out", ROOT, deadline=time.monotonic() + 30)
    assert len(tries) == 3
    assert files_below(tmp_path / "out") == files


def test_a_pack_is_given_up_after_four_tries(tmp_path: Path) -> None:
    packed = pack(write_tree(tmp_path / "tree", {"a": b"a"}), tmp_path / "blobs")
    tries: list[str] = []

    def fetch(digest: str) -> bytes:
        tries.append(digest)
        raise StoreError("503")

    (tmp_path / "out").mkdir()
    with pytest.raises(StoreError):
        materialise(fetch, packed.packs, packed.table, tmp_path / "out", ROOT, deadline=time.monotonic() + 30)
    assert len(tries) == 4


def test_a_fetch_that_hangs_ends_at_the_deadline(tmp_path: Path) -> None:
    packed = pack(write_tree(tmp_path / "tree", {"a": b"a"}), tmp_path / "blobs")
    never = threading.Event()

    def fetch(digest: str) -> bytes:
        never.wait(20)
        return b""

    (tmp_path / "out").mkdir()
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="1 of 1 packs missing"):
        materialise(fetch, packed.packs, packed.table, tmp_path / "out", ROOT, deadline=began + 0.2)
    assert time.monotonic() - began < 5
    never.set()


def test_packs_are_fetched_before_the_table_is_there_and_nothing_is_written_by_then(tmp_path: Path) -> None:
    files = {**tree_files(ROOT), "inductor/big.bin": os.urandom(20_000)}
    packed = pack(write_tree(tmp_path / "tree", files), tmp_path / "blobs", SMALL)
    (tmp_path / "out").mkdir()
    asked: set[str] = set()
    is_enough = threading.Event()

    def fetch(digest: str) -> bytes:
        asked.add(digest)
        if len(asked) >= min(3, len(packed.packs)):
            is_enough.set()
        return (tmp_path / "blobs" / digest).read_bytes()

    with fetching(fetch, packed.packs, tmp_path / "out", ROOT, deadline=time.monotonic() + 30) as writing:
        assert is_enough.wait(20)
        assert os.listdir(tmp_path / "out") == []
        writing.finish(packed.table)
    assert files_below(tmp_path / "out") == files


def test_twelve_packs_are_asked_for_at_a_time_the_biggest_first(tmp_path: Path) -> None:
    files = {f"inductor/{number}.bin": os.urandom(4096 - 100 * number) for number in range(20)}
    packed = pack(write_tree(tmp_path / "tree", files), tmp_path / "blobs", SMALL)
    assert len(packed.packs) == 20
    (tmp_path / "out").mkdir()
    all_here, lock = threading.Barrier(12), threading.Lock()
    asked: list[str] = []
    running: list[int] = [0]

    def fetch(digest: str) -> bytes:
        with lock:
            asked.append(digest)
            running.append(running[-1] + 1)
            is_of_the_first = len(asked) <= 12
        if is_of_the_first:
            all_here.wait(20)  # or nobody goes on
        data = (tmp_path / "blobs" / digest).read_bytes()
        with lock:
            running.append(running[-1] - 1)
        return data

    with fetching(fetch, packed.packs, tmp_path / "out", ROOT, deadline=time.monotonic() + 30) as writing:
        writing.finish(packed.table)
    assert max(running) == 12
    biggest = sorted(packed.packs, key=lambda blob: blob.size_bytes, reverse=True)
    assert set(asked[:12]) == {blob.digest for blob in biggest[:12]}
    assert files_below(tmp_path / "out") == files


def test_fetchers_end_when_there_will_be_no_table(tmp_path: Path) -> None:
    packed = pack(write_tree(tmp_path / "tree", tree_files(ROOT)), tmp_path / "blobs")
    (tmp_path / "out").mkdir()
    others, started = set(threading.enumerate()), threading.Event()

    def fetch(digest: str) -> bytes:
        started.set()
        return (tmp_path / "blobs" / digest).read_bytes()

    with (
        pytest.raises(IntegrityError, match="file table"),
        fetching(fetch, packed.packs, tmp_path / "out", ROOT, deadline=time.monotonic() + 30),
    ):
        assert started.wait(20)
        fetchers = set(threading.enumerate()) - others
        raise IntegrityError("file table", "damaged")
    for fetcher in fetchers:
        fetcher.join(20)
        assert not fetcher.is_alive()
    assert os.listdir(tmp_path / "out") == []


def test_a_full_file_system_is_no_room(tmp_path: Path) -> None:
    import subprocess
    import sys

    tree = write_tree(tmp_path / "tree", {"a": os.urandom(100_000)})
    pack(tree, tmp_path / "blobs")
    code = f"""
import resource, time
from pathlib import Path
from cachepipe.adapters.materialise import materialise
from cachepipe.adapters.packs import pack_tree
from cachepipe.errors import NoRoomError
base = Path({str(tmp_path)!r})
packed = pack_tree(base / "tree", {{"a": (0,)}}, "/r", base / "blobs")
(base / "out").mkdir()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
fetch = lambda digest: (base / "blobs" / digest).read_bytes()
try:
    materialise(fetch, packed.packs, packed.table, base / "out", "/r", deadline=time.monotonic() + 20)
except NoRoomError as error:
    print("no room:", error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("no room:"), ran.stderr
    assert NoRoomError.exit_code == 20


paths = st.lists(
    st.text("abcXYZ019._+=-", min_size=1, max_size=6).filter(lambda part: part[0] not in ".-" and "tmp" not in part),
    min_size=1,
    max_size=3,
).map("/".join)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(files=st.dictionaries(paths, st.binary(max_size=3000), max_size=12), cap=st.integers(1, 5000))
def test_every_tree_comes_back_as_it_was(files: dict[str, bytes], cap: int) -> None:
    import tempfile

    folders = {path.rpartition("/")[0] for path in files}
    parents = {"/".join(folder.split("/")[: n + 1]) for folder in folders for n in range(folder.count("/") + 1)}
    files = {path: data for path, data in files.items() if path not in parents and not path.endswith((".lock", ".pyc"))}
    files = {path: data for path, data in files.items() if "locks" not in path}
    with tempfile.TemporaryDirectory() as base:
        tree = write_tree(Path(base, "tree"), files)
        tree.mkdir(exist_ok=True)
        limits = Limits(pack_raw_bytes=cap)
        packed = pack(tree, Path(base, "blobs"), limits)
        unpack(packed, Path(base, "blobs"), Path(base, "out"), limits=limits)
        assert files_below(Path(base, "out")) == files
