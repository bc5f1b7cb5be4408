"""The statement: what an artifact is, what it was built for and how well, in one signed text.

On the wire it is a DSSE envelope (`domain/trust.py`) over an in-toto Statement v1. The subjects are the artifact's
packs, file table and explain data by SHA-256; the predicate is the record `Statement` below:

    {"_type":"https://in-toto.io/Statement/v1",
     "predicateType":"https://cachepipe.dev/artifact/v1",
     "subject":[{"digest":{"sha256":"…"},"name":"packs/…"},…],
     "predicate":{"artifact":"01J…","release":"text-encoder",…}}

Source: in-toto attestation framework, Statement v1 (spec/v1/statement.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cachepipe.domain.artifact import Blob
from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.fingerprint import Part
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.phases import Phases
from cachepipe.domain.record import Json, canonical_bytes, from_json, is_digest, parse_json, to_json
from cachepipe.domain.variables import is_root
from cachepipe.errors import IntegrityError

FORMAT = 1
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://cachepipe.dev/artifact/v1"


@dataclass(frozen=True)
class BucketFacts:
    """What the builder measured for one shape bucket, seconds of wall time in fresh processes."""

    shape_bucket: Mapping[str, int]
    graphs: int
    """Graphs that torch compiled at this shape bucket's first call (0: it shares a dynamic graph)."""
    cold_s: float
    """First call in the tune step, empty directory."""
    restored_s: float
    """First call in the prove step."""
    eager_s: float
    """First call without torch.compile."""
    max_abs_diff: float
    """Largest absolute difference of outputs (and gradients) to eager."""
    output_digest: str
    cold_phases: Phases = field(default_factory=Phases)
    """`cold_s` by where the time went."""


@dataclass(frozen=True)
class EntryRecord:
    """One entry of the artifact with its evidence."""

    spec: EntrySpec
    key: str
    """The entry key: digest over `key_parts`."""
    key_parts: Mapping[str, str]
    """Named part → its own digest, so that two keys can be compared in words."""
    kinds: Mapping[str, int]
    """Files by kind: `fxgraph`, `aotautograd`, `native`, `wrapper`, `tuning`, `triton`, `engine`, `other`."""
    shape_buckets: tuple[BucketFacts, ...]
    graph_breaks: int
    tuning: Json
    """Facts of tune and settle: benchmarks, tuning runs, rounds, seconds by step."""
    environment: Mapping[str, str]
    """torch settings in force while the entry was built, for comparison in the service."""


@dataclass(frozen=True)
class Statement:
    """The predicate; see the module's docstring."""

    format: int
    artifact: str
    """ULID, never reused."""
    release: str
    root: str
    """`<cache_root>/<release>`: where the builder compiled, where services restore."""
    created_at: str
    """RFC 3339, UTC, whole seconds."""
    device: str
    """`cpu` or `cuda`."""
    fingerprint: tuple[Part, ...]
    entries: tuple[EntryRecord, ...]
    packs: tuple[Blob, ...]
    table: Blob
    explain: Blob
    files: int
    unpacked_bytes: int
    tuned_bytes: int
    """Raw bytes of the tune step's directories, for the report's ratio."""
    variables: Mapping[str, str]
    """Environment variables that restore sets beside the cache directories."""
    compiler: Mapping[str, str]
    """Texts that the builder's C++ compiler answers to `--version` and `-v`; empty without native code."""
    gates: Mapping[str, float]
    """The limits that the artifact passed."""
    builder: Mapping[str, str]
    """Provenance: cachepipe version, host name digest, source commit, manifest digest."""


def statement_bytes(statement: Statement) -> bytes:
    """Returns the in-toto payload of a statement in canonical bytes."""
    blobs = (*statement.packs, statement.table, statement.explain)
    return canonical_bytes(
        {
            "_type": STATEMENT_TYPE,
            "predicateType": PREDICATE_TYPE,
            "subject": [{"name": f"packs/{blob.digest}", "digest": {"sha256": blob.digest}} for blob in blobs],
            "predicate": to_json(statement),
        }
    )


def read_statement(payload: bytes, limits: Limits = LIMITS) -> Statement:
    """Returns the statement in an in-toto payload that a verified envelope covered.

    Raises:
        IntegrityError: not strict, a foreign type, an unknown format, sizes beyond the limits, subjects that are not
            exactly the blobs of the predicate.
    """
    tree = parse_json(payload, "statement", limits.statement_bytes)
    if not isinstance(tree, dict) or set(tree) != {"_type", "predicateType", "subject", "predicate"}:
        raise IntegrityError("statement", "not an in-toto statement")
    for name, wanted in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
        if tree[name] != wanted:
            raise IntegrityError("statement", f"foreign {name}", wanted=wanted, found=str(tree[name])[:128])
    predicate = tree["predicate"]
    found = predicate.get("format") if isinstance(predicate, dict) else None
    if type(found) is not int or found != FORMAT:
        raise IntegrityError("statement", "unknown format", wanted=FORMAT, found=found)
    statement = from_json(Statement, predicate, "statement")
    _check_sizes(statement, limits)
    if canonical_bytes(tree["subject"]) != canonical_bytes(
        parse_json(statement_bytes(statement), "", 1 << 30)["subject"]
    ):
        raise IntegrityError("statement", "subjects are not the blobs of the predicate")
    return statement


def _check_sizes(statement: Statement, limits: Limits) -> None:
    sizes = [
        ("files", statement.files, limits.files),
        ("unpacked_bytes", statement.unpacked_bytes, limits.unpacked_bytes),
    ]
    bounds = [limits.pack_raw_bytes] * len(statement.packs) + [limits.table_raw_bytes, limits.explain_raw_bytes]
    for blob, raw_limit in zip((*statement.packs, statement.table, statement.explain), bounds, strict=True):
        if not is_digest(blob.digest):
            raise IntegrityError("statement", "a digest is not SHA-256")
        sizes += [
            ("raw_bytes", blob.raw_bytes, raw_limit),
            ("size_bytes", blob.size_bytes, raw_limit + raw_limit // 128 + 1024),
        ]
    for what, size, limit in sizes:
        if not 0 <= size <= limit:
            raise IntegrityError("statement", what, wanted=f"0..{limit}", found=size)
    if not is_root(statement.root):
        raise IntegrityError("statement", "root is not an absolute path", found=statement.root[:128], wanted="/…")
