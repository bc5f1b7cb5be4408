"""Coverage-guided fuzzing (atheris) of everything that reads bytes from a store or from people.

    python -m tests.fuzz.targets envelope --seconds 60 [--corpus DIR]        from the checkout; names: see TARGETS

A target fails on any exception that is not ours, and on anything that is accepted although it must not be. Inputs that gave
new coverage stay in the corpus folder, and the next run goes on from them.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["cachepipe"]):
    from cachepipe.adapters.manifest_file import load_manifest
    from cachepipe.adapters.packs import open_blob
    from cachepipe.domain.artifact import Blob, check_path, read_table, table_bytes
    from cachepipe.domain.index import PAYLOAD_TYPE, first_index, index_bytes, read_index
    from cachepipe.domain.lock import lock_bytes, lock_of, read_lock
    from cachepipe.domain.marker import marker_bytes, read_marker
    from cachepipe.domain.policy import policy_bytes, read_policy
    from cachepipe.domain.statement import read_statement, statement_bytes
    from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE, check_keys, open_envelope, verify
    from cachepipe.errors import CachepipeError, IntegrityError, ManifestError, TrustError

from cachepipe.workflows.fetch import row_of
from tests.support import authority
from tests.support.artifacts import NOW, make_artifact
from tests.support.manifests import FULL
from tests.support.release import REPOSITORY

_WORK = tempfile.TemporaryDirectory()
_PACKED = make_artifact(Path(_WORK.name))
_STATEMENT = _PACKED.statement
_JUDGE = check_keys(authority.policy())
_ENVELOPE = authority.sealed(statement_bytes(_STATEMENT), STATEMENT_PAYLOAD_TYPE, "s")
_INDEX = first_index("demo", "stable", (row_of(_STATEMENT, _ENVELOPE),), NOW, "0" * 32)
_SIGNED_INDEX = authority.sealed_index(_INDEX)
_RECORDS: tuple[tuple[Callable[[bytes], Any], Callable[[Any], bytes]], ...] = (
    (lambda data: read_index(data, "demo", "stable", 1), index_bytes),
    (read_statement, statement_bytes),
    (read_lock, lock_bytes),
    (read_marker, marker_bytes),
    (read_policy, policy_bytes),
)
_TABLE = bytes(open_blob((_PACKED.blobs / _STATEMENT.table.digest).read_bytes(), _STATEMENT.table))


def envelope(data: bytes) -> None:
    """Of all texts there is only one that these keys signed as an index."""
    try:
        verify(data, PAYLOAD_TYPE, "x", _JUDGE, NOW)
    except (IntegrityError, TrustError):
        open_quietly(data)
        return
    assert data == _SIGNED_INDEX


def open_quietly(data: bytes) -> None:
    try:
        opened = open_envelope(data, PAYLOAD_TYPE, "x")
    except (IntegrityError, TrustError):
        return
    assert len(opened.signatures) <= 8


def index(data: bytes) -> None:
    """An index that is accepted says the same again in its own bytes; so do statement, lock, marker and policy."""
    for read, write in _RECORDS:
        try:
            found = read(data)
        except (IntegrityError, TrustError):
            continue
        assert read(write(found)) == found


def archive(data: bytes) -> None:
    """A table that is accepted has safe names; a frame that is accepted has the promised length."""
    try:
        table = read_table(data, _STATEMENT.packs, 1)
        for row in table.files:
            check_path(row.path)
        assert read_table(table_bytes(table), _STATEMENT.packs, 1) == table
    except IntegrityError:
        pass
    size = data[0] * 16 if data else 0
    try:
        assert len(open_blob(data[1:], Blob(hashlib.sha256(data[1:]).hexdigest(), len(data[1:]), size))) == size
    except IntegrityError:
        pass


def manifest(data: bytes) -> None:
    """Any text is a manifest or a list of problems."""
    path = Path(_WORK.name, "manifest.yaml")
    path.write_bytes(data)
    try:
        load_manifest(path)
    except ManifestError as error:
        assert error.problems
    except CachepipeError:
        return


TARGETS: dict[str, tuple[Callable[[bytes], None], tuple[bytes, ...]]] = {
    "envelope": (envelope, (_ENVELOPE, _SIGNED_INDEX)),
    "index": (
        index,
        (
            *(index_bytes(_INDEX), statement_bytes(_STATEMENT), lock_bytes(lock_of(_INDEX, "/r"))),
            *(policy_bytes(_JUDGE), (REPOSITORY / "tests/compat/format-1/marker.json").read_bytes()),
        ),
    ),
    "archive": (archive, (_TABLE,)),
    "manifest": (manifest, (FULL.encode(),)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="default: a new folder")
    given = parser.parse_args()
    corpus = given.corpus or Path(_WORK.name, "corpus")
    corpus.mkdir(parents=True, exist_ok=True)
    run, seeds = TARGETS[given.target]
    for seed in seeds:
        (corpus / hashlib.sha256(seed).hexdigest()).write_bytes(seed)
    words = [sys.argv[0], f"-max_total_time={given.seconds}", "-max_len=16384", "-timeout=10", "-rss_limit_mb=2048"]
    words += [f"-artifact_prefix={corpus}/failed-", "-print_final_stats=1", str(corpus)]
    atheris.Setup(words, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
