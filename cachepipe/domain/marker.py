"""The marker: the last file of a restored folder; without a valid one the folder is not used.

`<folder>/.cachepipe/marker.json`, canonical JSON. It holds all that a later start needs when nothing changed, so that
`already present` reads neither the store nor a statement. Times and inodes are texts: they are beyond 2**53.

    {"bytes":660000,"channel":"stable","cpu_isa":"","expires_at":"2026-12-14T10:00:00Z","files":
     [["inductor/ab/cab.py",12,"1796000000000000000","4711","<sha256>"],…],"format":1,"has_compiler_stub":false,
     "host":"<digest>","index_created_at":"2026-11-30T10:00:00Z","index_ends_at":"2026-12-14T10:00:00Z","index_version":42,"names":["text-encoder"],"policy":"<sha256>","root":"/var/cache/cachepipe/text-encoder",
     "seal":"<sha256>","statements":["<sha256>"],"trust":"signed","variables":{"TORCHINDUCTOR_VEC_ISA_OK":"1"}}

`seal` is the SHA-256 of these bytes with an empty seal: of all files of the folder this is the one that no other vouches for, and a
flipped bit in a variable would start the service cold without a word. Markers of before it was kept have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from cachepipe.domain.index import age_warning
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.record import Json, canonical_bytes, from_json, parse_json, sha256, to_json
from cachepipe.errors import IntegrityError

FORMAT = 1
FOLDER = ".cachepipe"
PATH = ".cachepipe/marker.json"
STATEMENTS = ".cachepipe/statements"
"""Payloads, which the service reads, as `<digest>.json`."""
ENVELOPES = ".cachepipe/envelopes"
"""Their envelopes, by which they can be judged anew without a store, as `<digest>.json`."""
BIN = ".cachepipe/bin"
_NO_SEAL = b'"seal":""'
"""Found once: inside a text its quotes would be escaped."""


class MarkedFile(NamedTuple):
    """A file as it was when the folder was complete; equal stat means unchanged."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int
    sha256: str
    """Of the bytes on disk: for a group file not the table's digest."""


@dataclass(frozen=True)
class Marker:
    """What the marker of a restored folder says."""

    format: int
    names: tuple[str, ...]
    """Releases in the folder, in the order of the command line."""
    statements: tuple[str, ...]
    """SHA-256 of each release's statement envelope, in the same order."""
    root: str
    """The folder that group files name; elsewhere the folder is not valid."""
    host: str
    """Digest of facts that a fingerprint depends on (`host_tag`); if another, fingerprints are compared anew."""
    channel: str
    """Empty when a lock file chose the statements."""
    index_version: int
    expires_at: str
    trust: str
    """How far the statements are trusted: `domain.trust.Verified.status`."""
    policy: str
    """By what they were judged: the trust policy's SHA-256, or a word for none, and for a channel the store. Under another one they are
    judged anew."""
    bytes: int
    """Compressed bytes that were fetched."""
    variables: Mapping[str, str]
    cpu_isa: str
    """Vector ISA of native code; empty without any."""
    has_compiler_stub: bool
    files: tuple[MarkedFile, ...]
    """All of the folder but the lease and the marker itself."""
    index_created_at: str = ""
    """Empty as `channel`, and in markers of before it was kept: then no start warns of the index's age."""
    index_ends_at: str = ""
    """When the index expires by its own word or the policy's; a key may end `expires_at` earlier."""

    def age_warning(self, now: datetime) -> str:
        """Returns what a start says of the index's age, in the words of the start that read it; empty: nothing.

        Raises:
            IntegrityError: what should be a time is none.
        """
        if not self.index_created_at:
            return ""
        label = f"{self.names[0]}@{self.channel}:{self.index_version}"
        return age_warning(label, self.index_created_at, self.index_ends_at, now)


def marker_bytes(marker: Marker) -> bytes:
    """Returns the canonical bytes of a marker, sealed."""
    rows = [[f.path, f.size_bytes, str(f.mtime_ns), str(f.inode), f.sha256] for f in marker.files]
    data = canonical_bytes({**to_json(replace(marker, files=())), "files": rows, "seal": ""})
    return data.replace(_NO_SEAL, _seal(sha256(data)), 1)


def read_marker(data: bytes, limits: Limits = LIMITS) -> Marker:
    """Returns the marker in `data`.

    Raises:
        IntegrityError: not strict, of an unknown format, not as it was sealed, or a file row of a wrong form.
    """
    tree = parse_json(data, "marker", limits.table_raw_bytes)
    if isinstance(tree, dict) and "seal" in tree:
        seal = str(tree.pop("seal"))
        found = sha256(data.replace(_seal(seal), _NO_SEAL, 1))
        if found != seal:
            raise IntegrityError("marker", "changed since it was written", wanted=seal, found=found)
    rows = tree.pop("files", None) if isinstance(tree, dict) else None
    if not isinstance(rows, list) or tree.get("format") != FORMAT:
        raise IntegrityError("marker", "not a marker of this format", wanted=FORMAT, found=str(tree)[:40])
    marker = from_json(Marker, {**tree, "files": []}, "marker")
    return replace(marker, files=tuple(_read_row(row) for row in rows))


def _seal(digest: str) -> bytes:
    return b'"seal":"%s"' % digest.encode()


def _read_row(row: Json) -> MarkedFile:
    try:
        path, size_bytes, mtime_ns, inode, sha256 = row
        if type(path) is str and type(size_bytes) is int and type(sha256) is str:
            return MarkedFile(path, size_bytes, int(mtime_ns), int(inode), sha256)
    except (TypeError, ValueError):
        pass
    raise IntegrityError("marker", "a file row of a wrong form", wanted="5 fields", found=str(row)[:80])
