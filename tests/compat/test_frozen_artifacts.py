"""Artifacts of every format that was ever released stay restorable (T-COMPAT); a format that is not known is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.materialise import materialise
from cachepipe.adapters.store import TrustChoice
from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.index import PAYLOAD_TYPE, select
from cachepipe.domain.layout import FORMAT_KEY, index_key, pack_key
from cachepipe.domain.lock import read_lock
from cachepipe.domain.marker import marker_bytes, read_marker
from cachepipe.domain.policy import read_policy
from cachepipe.domain.statement import read_statement
from cachepipe.errors import CachepipeError, FingerprintMismatchError, IntegrityError, StoreError, TrustError
from cachepipe.workflows.fetch import Artifact, check_format, read_artifact, read_channel, read_file_table
from tests.compat.freeze import freeze
from tests.support.artifacts import CPU_PARTS, NOW, ROOT, parts_of
from tests.support.restoring import files_below, run_restore, tree_files
from tests.support.world import MACHINE

HERE = Path(__file__).parent
FORMATS = sorted(path.name for path in HERE.glob("format-*"))


@pytest.fixture(params=FORMATS)
def frozen(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    copy = tmp_path / request.param
    shutil.copytree(HERE / request.param, copy)
    (copy / "trust.json").chmod(0o644)  # a checkout under a wide umask opens it to the group
    return copy


def opened(frozen: Path) -> LocalStore:
    store = LocalStore(frozen / "store", TrustChoice(policy_file=str(frozen / "trust.json")))
    store.now = NOW
    return store


def written(store: LocalStore, artifact: Artifact, target: Path) -> dict[str, bytes]:
    statement = artifact.statement
    sizes = {pack.digest: pack.size_bytes for pack in statement.packs}

    def fetch(digest: str) -> bytes:
        data = store.get(pack_key(statement.artifact, digest), sizes[digest])
        assert data is not None
        return data

    target.mkdir(mode=0o700)
    table = read_file_table(store, statement)
    materialise(fetch, statement.packs, table, target, str(target), deadline=time.monotonic() + 60)
    return files_below(target)


def test_there_is_a_frozen_artifact_of_the_current_format() -> None:
    from cachepipe.domain.statement import FORMAT

    assert f"format-{FORMAT}" in FORMATS


def test_a_frozen_artifact_is_restored_byte_for_byte_from_its_channel_and_its_lock(
    frozen: Path, tmp_path: Path
) -> None:
    check_restored(frozen, tmp_path)


def test_what_would_be_frozen_today_is_restored_the_same_way(tmp_path: Path) -> None:
    freeze(tmp_path / "today")
    check_restored(tmp_path / "today", tmp_path)


def check_restored(frozen: Path, tmp_path: Path) -> None:
    store = opened(frozen)
    index = read_channel(store, "demo", "stable", NOW).index
    assert index.version == 2
    row = select(index.rows, MACHINE, "demo", index.revoked)
    (pinned,) = read_lock((frozen / "cachepipe.lock").read_bytes()).rows
    for number, artifact in enumerate(
        (read_artifact(store, row, "demo"), read_artifact(store, pinned, is_pinned=True))
    ):
        assert artifact.status == "signed"
        target = tmp_path / f"target{number}"
        files = {path: data.replace(ROOT.encode(), str(target).encode()) for path, data in tree_files(ROOT).items()}
        assert written(store, artifact, target) == files


def test_a_frozen_artifact_whose_bytes_were_changed_is_refused(frozen: Path) -> None:
    for path in (*(frozen / "store").rglob("statement.dsse.json"), *(frozen / "store").rglob("0000000002.dsse.json")):
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"payload":"ey', b'"payload":"fy', 1))
        with pytest.raises((IntegrityError, TrustError)):
            store = opened(frozen)
            read_artifact(store, read_channel(store, "demo", "stable", NOW).index.rows[0], "demo")
        path.write_bytes(data)


def test_a_frozen_artifact_is_refused_by_name_on_another_machine_by_the_command_line(
    frozen: Path, tmp_path: Path
) -> None:
    """By its lock file, which has no age: no machine of ours has its virtual environment at /opt/venv with this compiler."""
    (tmp_path / "base").mkdir(mode=0o700)
    words = (f"file://{frozen}/store", "--lock", f"{frozen}/cachepipe.lock", "--trust", f"{frozen}/trust.json")
    ran = run_restore(tmp_path / "base", *words, "--dest", f"{tmp_path}/base/cache/demo", "--strict")
    assert ran.code == 19
    assert "venv: wanted /opt/venv, found " in ran.line["reason"]


@pytest.mark.parametrize("torch", ["2.11.0+cpu", "2.12.1+cpu", "2.13.1+cpu", "2.14.0+cpu"])
def test_a_frozen_artifact_is_refused_by_name_under_another_torch(frozen: Path, torch: str) -> None:
    rows = read_channel(opened(frozen), "demo", "stable", NOW).index.rows
    with pytest.raises(FingerprintMismatchError, match=re.escape(f"torch: wanted 2.13.0+cpu, found {torch}")):
        select(rows, Fingerprint(parts_of(CPU_PARTS, torch=torch)), "demo")


def test_a_frozen_marker_is_read_and_says_all_that_a_start_needs(frozen: Path) -> None:
    marker = read_marker((frozen / "marker.json").read_bytes())
    assert (marker.names, marker.channel, marker.index_version) == (("demo",), "stable", 1)
    assert (marker.root, marker.trust, len(marker.statements)) == ("/var/cache/cachepipe/demo", "signed", 1)
    assert set(tree_files(marker.root)) < {file.path for file in marker.files}
    assert marker.age_warning(NOW) == "", "its age was not kept then"
    assert read_marker(marker_bytes(marker)) == marker


def test_formats_of_a_later_release_are_refused_by_name(frozen: Path) -> None:
    store = opened(frozen)
    (statement,) = (frozen / "store").rglob("statement.dsse.json")
    payload = json.loads(store.trust.verify(statement.read_bytes(), "application/vnd.in-toto+json", "x").payload)
    payload["predicate"]["format"] = 99
    with pytest.raises(IntegrityError, match="statement: unknown format: wanted 1, found 99"):
        read_statement(json.dumps(payload).encode())
    lock = json.loads((frozen / "cachepipe.lock").read_bytes())
    with pytest.raises(IntegrityError, match="lock file: unknown format: wanted 1, found 99"):
        read_lock(json.dumps({**lock, "format": 99}).encode())
    marker = json.loads((frozen / "marker.json").read_bytes())
    with pytest.raises(IntegrityError, match="marker: not a marker of this format: wanted 1, found"):
        read_marker(json.dumps({**marker, "format": 99}).encode())
    policy = json.loads((frozen / "trust.json").read_bytes())
    with pytest.raises(TrustError, match="unknown format 99, this release reads 1"):
        read_policy(json.dumps({**policy, "format": 99}).encode())
    Path(store.root, FORMAT_KEY).write_text('{"features":[],"format":99}\n')
    with pytest.raises(StoreError, match="format 99"):
        check_format(store)


def test_an_index_of_a_later_format_is_refused_by_name(frozen: Path) -> None:
    from cachepipe.domain.index import read_index

    store = opened(frozen)
    data = Path(store.root, index_key("demo", "stable", 2)).read_bytes()
    tree = json.loads(store.trust.verify(data, PAYLOAD_TYPE, "x").payload)
    with pytest.raises(CachepipeError, match="99"):
        read_index(json.dumps({**tree, "format": 99}).encode(), "demo", "stable", 2)
