"""The audit of signing keys in KMS: what their log has, and what the store has, to the unit.

1 ask KMS which key each address is, by its ARN and its public key
2 read the log, whole
3 read every statement and every index version, whoever signed it: which signatures are those of the keys
4 pair them (`domain/kms_log.py`)

A signature counts where it is the key's over the bytes beneath it: junk under a key's name is nobody's partner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from cachepipe.adapters.log_files import find_logs, read_logs
from cachepipe.adapters.store import Store, StoredObject
from cachepipe.domain import trust
from cachepipe.domain.finding import Finding
from cachepipe.domain.index import PAYLOAD_TYPE, parse_timestamp, timestamp
from cachepipe.domain.kms_log import AuditedKey, KmsLog, StoredSignature, Window, compare
from cachepipe.domain.layout import ARTIFACTS, INDEXES, place_of
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.policy import STATEMENT, Key
from cachepipe.domain.record import parse_json, sha256
from cachepipe.errors import IntegrityError, TrustError, UsageError

WORKERS = 8
"""Objects in flight: on S3 a look waits for round trips, not for this machine."""
_TYPES = {"statement": trust.STATEMENT_PAYLOAD_TYPE, "index": PAYLOAD_TYPE}


class AuditRequest(NamedTuple):
    logs: Sequence[Path]
    keys: Sequence[str]
    """`kms:KEY`."""
    window: Window


@dataclass(frozen=True)
class KeyCount:
    """One key's signatures from `since` to `until`."""

    key: str
    arn: str
    keyid: str
    logged: int
    stored: int
    since: str
    until: str


@dataclass(frozen=True)
class Audit:
    keys: tuple[KeyCount, ...]
    findings: tuple[Finding, ...]


def audit(store: Store, request: AuditRequest, now: datetime, kms_client: Any = None) -> Audit:
    """Returns what does not pair between a log and a store; nothing is written.

    Args:
        store: where the keys sign, and nowhere else.
        request: which keys, which log, and when everything must have its partner.
        now: when this began, to tell when objects were written.
        kms_client: in place of boto3's own.

    Raises:
        UsageError: not an address of a KMS key, a log that cannot be read.
        TrustError: KMS refuses, or has no such key.
        IntegrityError: what is given is no log of CloudTrail.
        StoreError: the store fails.
    """
    began = monotonic()
    keys = {
        key.keyid: (key, public) for key, public in (_look_up(address, kms_client) for address in request.keys)
    }  # 1
    audited = [key for key, _ in keys.values()]
    log = KmsLog(audited, request.window)  # 2
    files = find_logs(request.logs)
    for what, data in read_logs(files.logs):
        log.add(data, what)
    look = _Look(store, {keyid: public for keyid, (_, public) in keys.items()}, request.window)
    # A long log takes minutes, and objects tell their ages from now on.
    stored = look.signatures(now + timedelta(seconds=monotonic() - began))  # 3
    findings = [*_passed_over(files.others), *look.findings()]
    for key in audited:  # 4
        own = [one for one in stored if one.keyid == key.keyid]
        roles = [listed.has_role(STATEMENT) for listed in store.trust.policy.keys if listed.keyid == key.keyid]
        findings += compare(key, log, own, request.window, now, may_be_gone=all(roles))
    return Audit(tuple(_count(key, log, stored, request.window) for key in audited), tuple(findings))


def _passed_over(others: Sequence[Path]) -> Iterator[Finding]:
    if others:
        told = ", ".join(map(str, others[:3])) + (", …" if len(others) > 3 else "")
        yield Finding(False, "logs", f"{len(others)} files are not named as logs are (`*.json`, `*.json.gz`): {told}")


def _look_up(address: str, kms_client: Any) -> tuple[AuditedKey, Key]:
    from cachepipe.adapters import signer  # 0.12 s that a check without an audit need not pay
    from cachepipe.adapters.kms import KmsKey

    if not address.startswith(signer.KMS):
        raise UsageError(f"not a key in KMS: `{address[:80]}`", hint="use `kms:alias/…`: other keys have no log")
    found = KmsKey(address.removeprefix(signer.KMS), kms_client).public_key()
    if found is None:
        raise TrustError(f"there is no KMS key {address.removeprefix(signer.KMS)}", hint="name one that signs here")
    public = signer.pem_of(found.der)
    keyid = trust.keyid_of(public)
    return AuditedKey(address, found.arn, keyid), Key(keyid, public, ())


def _count(key: AuditedKey, log: KmsLog, stored: Sequence[StoredSignature], window: Window) -> KeyCount:
    logged = sum(event.time in window for event in log.events[key.keyid])
    held = {one.digest for one in stored if one.keyid == key.keyid and one.written_at in window}
    return KeyCount(*key, logged, len(held), timestamp(window.since), timestamp(window.until))


class _Look:
    """One look at all signatures of a store."""

    def __init__(self, store: Store, keys: dict[str, Key], window: Window) -> None:
        self._store, self._keys, self._window = store, keys, window
        self._junk: list[Finding] = []
        self._others: list[str] = []  # appending is all that threads do to it

    def signatures(self, now: datetime) -> list[StoredSignature]:
        """Returns those of the keys; what cannot be opened as what it should be is named by fsck, and is nobody's partner."""
        places = [
            (found, place.kind, now - timedelta(seconds=found.age_s))
            for prefix in (ARTIFACTS, INDEXES)
            for found in self._store.list_objects(prefix)
            if (place := place_of(found.key)) is not None and place.kind in _TYPES
        ]
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="audit") as pool:
            return [one for several in pool.map(lambda place: list(self._read(*place)), places) for one in several]

    def findings(self) -> Iterator[Finding]:
        yield from self._junk
        for keyid, count in sorted(Counter(self._others).items()):
            yield Finding(
                False, f"key {keyid[:20]}", f"{count} signatures here in this time, and its log was not asked for"
            )

    def _read(self, found: StoredObject, kind: str, written_at: datetime) -> Iterator[StoredSignature]:
        limit = LIMITS.statement_bytes if kind == "statement" else LIMITS.index_bytes
        try:
            envelope = self._store.get(found.key, limit)
            opened = trust.open_envelope(envelope or b"", _TYPES[kind], found.key)
        except (IntegrityError, TrustError):
            return
        message = trust.pae(opened.payload_type, opened.payload)
        for row in opened.signatures:
            key = self._keys.get(row.keyid)
            if key is None:
                self._others += [row.keyid] if written_at in self._window else []
            elif trust.is_signed_by(key, row.sig, message):
                created_at = _created_at(opened.payload, kind)
                yield StoredSignature(row.keyid, sha256(message), found.key, written_at, created_at)
            else:
                self._junk.append(
                    Finding(True, found.key, f"a signature of key {row.keyid[:20]} is not of these bytes")
                )


def _created_at(payload: bytes, kind: str) -> datetime | None:
    try:
        tree = parse_json(payload, kind, LIMITS.index_bytes)
        told = tree["predicate"]["created_at"] if kind == "statement" else tree["created_at"]
        return parse_timestamp(told, kind)
    except (IntegrityError, KeyError, TypeError, AttributeError):
        return None  # fsck says what is wrong with it
