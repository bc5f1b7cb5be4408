"""What AWS CloudTrail recorded of a signing key, against the signatures that a store holds: to the unit.

CloudTrail's record of `Sign` holds neither message nor digest, but the caller's User-Agent. There `adapters/kms.py` names the
SHA-256 that it has signed (of the DSSE pre-authentication encoding):

    Boto3/1.44.3 md/Botocore#1.44.3 … md/cachepipe#sha256.<64 hex digits>

Whoever may call KMS may write any User-Agent: a name proves nothing, the count and the time do. Every signature is one recorded
event, and what it signed is dated, and written right after it, so a signature that was hidden leaves an event over, whatever name it
bears:

    no name                        made by something else, and by nothing of ours
    a name that nothing has        hidden; or a publisher died, or lost a race for an index version, between signing and writing
    a name of another time         hidden behind what was written before, or long after; or that was copied or put back since
    a name once too often          one of the events signed something else; or KMS's answer was lost, and botocore asked again
    a signature without an event   the log is not whole, or the signature was made beyond it and copied here

However often and in whatever form a store holds the signature of one text, it stands for one event, at the time when it was first
written: nothing of ours keeps two, and whoever has an ECDSA signature can write it in a second form that holds as well.

What is looked for from a time on needs a log from a day before it (`LONGEST`): else two events that share one partner look like one.

What gc removed after a while can no longer be told from what was hidden: rows of old index versions name a statement by the digest
of its envelope, signature and all. Index versions stay for ever.

Records look like this; others of the log are passed over, and so is what failed (`errorCode`), a dry run among it, whose answer is an
error:

    {"eventSource": "kms.amazonaws.com", "eventName": "Sign", "eventTime": "2026-11-30T10:00:00Z", "eventID": "…", "userAgent": "…",
     "userIdentity": {"arn": "…"}, "sourceIPAddress": "…", "requestParameters": {"keyId": "alias/build", …},
     "resources": [{"type": "AWS::KMS::Key", "ARN": "arn:aws:kms:eu-west-1:111122223333:key/…"}]}

Source: AWS KMS Developer Guide, "Logging AWS KMS API calls with AWS CloudTrail", its example of Sign (a read-only management
event) and "Testing your AWS KMS API calls"; AWS CloudTrail User Guide, "CloudTrail record contents" (`sharedEventID`: one action in
the logs of two accounts) and "CloudTrail log file examples"; AWS CLI, `cloudtrail lookup-events`. Multi-Region keys (`mrk-`) have
one key in several Regions: AWS KMS Developer Guide, "Multi-Region keys".
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from cachepipe.domain.collect import DAY_S, FLOORS
from cachepipe.domain.finding import Finding
from cachepipe.domain.index import parse_timestamp, timestamp
from cachepipe.domain.limits import MIB
from cachepipe.domain.printable import printable
from cachepipe.domain.record import Json
from cachepipe.errors import IntegrityError

SLACK = timedelta(minutes=5)
"""How far the clocks of KMS, of the store and of a publisher may differ."""
TO_WRITE = timedelta(hours=1)
"""How long a signature may take to be written: seconds, and minutes where other keys of KMS or the store want every retry. Nothing of
ours writes a signature that it found: what is in the store already is never signed again, and what is not is signed anew."""
LONGEST = timedelta(days=1)
"""How long after its own date a text may be signed: that is the start of the build that publishes it."""
HINT = (
    "give CloudTrail's log files, or the output of `aws cloudtrail lookup-events`, whole and as they are; "
    "`aws cloudtrail validate-logs` proves that nobody changed them"
)
_CLAIM = "md/cachepipe#sha256."
_CLAIMED = re.compile(rf"(?:^|\s){re.escape(_CLAIM)}([0-9a-f]{{64}})(?=\s|$)", re.ASCII)
_NAMED = 3
"""Events in one message."""
_SHOWN = 160
"""Characters of a caller's name in a message: it is the caller's own choice."""


@dataclass(frozen=True)
class LogLimits:
    """What is read of logs at most."""

    file_bytes: int = 64 * MIB
    """As it lies there: a record has at most 256 KB (AWS CloudTrail User Guide, "Quotas"), a file holds those of some minutes, a
    few MB. What was looked up over years may be given in several files."""
    raw_bytes: int = 64 * MIB
    """Unpacked."""
    values: int = 3_000_000
    """Of one text, counted by its commas and brackets before it is parsed: a process took 1.1 GiB at most for texts of that many
    that were made to take much. The bytes alone do not bound that: 24 MiB of `[],[],…` took 0.7 GiB. Records have a value in about
    30 bytes, so that the longest file has two million."""
    files: int = 200_000
    """A year of twenty regions, one file every five minutes in each, is ten times as many: give the days that count."""
    events: int = 1_000_000
    """Signatures of the keys that are looked at: years of them."""


LOG_LIMITS = LogLimits()


class AuditedKey(NamedTuple):
    address: str
    """As it was asked for: `kms:alias/…`."""
    arn: str
    keyid: str
    """In envelopes: SHA-256 of the public key."""


class Window(NamedTuple):
    """From when until when everything must have its partner; the partner itself may lie just outside."""

    since: datetime
    until: datetime

    def __contains__(self, time: object) -> bool:
        return isinstance(time, datetime) and self.since <= time <= self.until


class SignEvent(NamedTuple):
    time: datetime
    digest: str
    """That the caller named; empty: none."""
    who: str


class StoredSignature(NamedTuple):
    """One that is the key's over the bytes where it stands."""

    keyid: str
    digest: str
    """SHA-256 of the pre-authentication encoding."""
    where: str
    """The object's key."""
    written_at: datetime
    """By the store's clock, which no signer can choose."""
    created_at: datetime | None
    """By the signed text; None: it says no time."""


def claim(digest: str) -> str:
    """Returns what names a digest in a User-Agent."""
    return _CLAIM + digest


class KmsLog:
    """Collects what a log holds of some keys.

    Args:
        keys: that are looked at.
        window: in which the log must not be silent.
        limits: how many events.
    """

    def __init__(self, keys: Sequence[AuditedKey], window: Window, limits: LogLimits = LOG_LIMITS) -> None:
        self.events: dict[str, list[SignEvent]] = {key.keyid: [] for key in keys}
        """Key id → its signatures, of all times."""
        self.heard: set[str] = set()
        """Ids of keys of which the log has anything within the window, be it a refusal."""
        self._names, self._window, self._limits = [(key, _names_of(key)) for key in keys], window, limits
        self._seen: set[str] = set()

    def add(self, data: bytes, what: str) -> None:
        """Takes one file's text; an event that another file held already counts once.

        Raises:
            IntegrityError: not a log of CloudTrail, a record of a signature that is not whole, or too many.
        """
        for record in _records(data, what, self._limits):
            if record.get("eventSource") != "kms.amazonaws.com":
                continue
            is_signature = record.get("eventName") == "Sign" and not record.get("errorCode")
            names = _key_names(record)
            key = next((key for key, own in self._names if not own.isdisjoint(names)), None)
            if key is None and is_signature:
                self._refuse_untold(names[0], what)
            if key is None:
                continue
            time = _time(record, what)
            if time in self._window:
                self.heard.add(key.keyid)
            if is_signature and self._is_new(record, what):
                named = _CLAIMED.findall(_text(record, "userAgent"))
                self.events[key.keyid].append(SignEvent(time, named[0] if len(named) == 1 else "", _who(record)))

    def _refuse_untold(self, name: str, what: str) -> None:
        """Refuses a signature by nobody knows which key: an alias may be one of ours by another name."""
        if not name or name.rpartition(":")[2].startswith("alias/"):
            raise IntegrityError(what, f"a record of Sign does not tell its key: {name[:_SHOWN]!r}", hint=HINT)

    def _is_new(self, record: Mapping[str, Json], what: str) -> bool:
        event = _text(record, "sharedEventID") or _text(record, "eventID")
        if not event:
            raise IntegrityError(what, "a record of Sign has no `eventID`", hint=HINT)
        if event in self._seen:
            return False
        if len(self._seen) == self._limits.events:
            raise IntegrityError(what, "too many signatures", wanted=f"<= {self._limits.events}", hint=HINT)
        self._seen.add(event)
        return True


def _records(data: bytes, what: str, limits: LogLimits) -> Iterator[Mapping[str, Json]]:
    """Yields the records of a log file (`Records`) or of looked up events (`Events`), which hold each record as a text."""
    tree = _json(data, what, limits)
    forms = [name for name in ("Records", "Events") if name in tree] if isinstance(tree, dict) else []
    if len(forms) != 1 or not isinstance(tree[forms[0]], list):
        raise IntegrityError(what, "not a log of CloudTrail: neither `Records` nor `Events`, or both", hint=HINT)
    for row in tree[forms[0]]:
        record = row if "Records" in tree else _json(_text(row, "CloudTrailEvent"), what, limits)
        if not isinstance(record, dict):
            raise IntegrityError(what, "not a log of CloudTrail: a record is not an object", hint=HINT)
        yield record


def _json(data: bytes | str, what: str, limits: LogLimits) -> Json:
    """Not `parse_json`: other services' records may hold what we would never write, such as an integer beyond 2**53."""
    if isinstance(data, bytes):
        values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    else:
        values = sum(data.count(mark) for mark in ",[{")
    if values > limits.values:
        raise IntegrityError(what, "too many values", wanted=f"<= {limits.values}", hint=HINT)
    try:
        return json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(what, f"not a log of CloudTrail: not JSON ({str(error)[:_SHOWN]})", hint=HINT) from error


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Returns an object of which every reader reads the same: none takes the first of two values, and another the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _text(record: Json, name: str) -> str:
    found = record.get(name) if isinstance(record, dict) else None
    return found if isinstance(found, str) else ""


def _time(record: Mapping[str, Json], what: str) -> datetime:
    try:
        return parse_timestamp(_text(record, "eventTime"), f"{what}: `eventTime` of a record")
    except IntegrityError as error:
        error.hint = HINT
        raise


def _key_names(record: Mapping[str, Json]) -> list[str]:
    """Returns what a record calls its key: the ARN where it gives one, for an alias may have named another key then."""
    resources = record.get("resources")
    arns = [_text(row, "ARN") for row in resources] if isinstance(resources, list) else []
    names = [arn for arn in arns if ":key/" in arn] or [_text(record.get("requestParameters"), "keyId")]
    return [_everywhere(name) for name in names]


def _names_of(key: AuditedKey) -> set[str]:
    """Returns what a record may call a key: its ARN, its id, or as it was asked for, with and without the account."""
    account, _, resource = key.arn.rpartition(":")
    asked = key.address.removeprefix("kms:").rsplit(":", 1)[-1]
    return {_everywhere(key.arn), resource.removeprefix("key/"), asked, f"{account}:{asked}"}


def _everywhere(arn: str) -> str:
    """Returns a name, the ARN of a multi-Region key without its Region."""
    parts = arn.split(":", 5)
    return ":".join([*parts[:3], *parts[4:]]) if parts[-1].startswith("key/mrk-") else arn


def _who(record: Mapping[str, Json]) -> str:
    identity = record.get("userIdentity")
    name = _text(identity, "arn") or _text(identity, "invokedBy") or _text(identity, "type") or "nobody named"
    event = _text(record, "sharedEventID") or _text(record, "eventID")
    who = f"{name[:_SHOWN]} from {_text(record, 'sourceIPAddress')[:_SHOWN] or 'nowhere'} (event {event[:_SHOWN]})"
    return printable(who)


# --- pairing ------------------------------------------------------------------------------------------------------------


def compare(
    key: AuditedKey, log: KmsLog, stored: Iterable[StoredSignature], window: Window, now: datetime, *, may_be_gone: bool
) -> Iterator[Finding]:
    """Yields what does not pair, one event to one signature.

    Args:
        key: one of the log's.
        log: all of it.
        stored: the store's signatures by this key, all of them.
        window: outside of it nothing needs a partner.
        now: to tell what gc may have removed.
        may_be_gone: the key may sign statements, which gc removes after a while; index versions stay for ever.
    """
    if key.keyid not in log.heard:
        yield Finding(True, key.address, _silence(window))
    named: dict[str, list[SignEvent]] = defaultdict(list)
    for event in log.events[key.keyid]:
        named[event.digest].append(event)
    held = {one.digest: one for one in sorted(stored, key=lambda one: (one.written_at, one.where), reverse=True)}
    for digest, events in named.items():
        one = held.get(digest)
        if one is not None and any(_is_of_its_time(event, one) for event in events):
            yield from _pair(key, events, one, window)
            continue
        for event in events:
            if event.time in window:
                yield _alone(key, event, one, now, may_be_gone)
    inner = Window(window.since + SLACK, window.until - SLACK)
    for digest, one in held.items():
        if one.written_at in inner and not any(_is_of_its_time(event, one) for event in named[digest]):
            yield Finding(True, one.where, f"{_by(key)}, {_NO_EVENT}")


def _is_of_its_time(event: SignEvent, one: StoredSignature) -> bool:
    """Tells whether a publisher can have signed then what was written as it was: it signs, then it writes."""
    return -SLACK <= one.written_at - event.time <= TO_WRITE + SLACK


def _alone(key: AuditedKey, event: SignEvent, one: StoredSignature | None, now: datetime, may_be_gone: bool) -> Finding:
    """Returns what is wrong with an event without a partner; `one` bears its name, and was written at another time."""
    if not event.digest:
        return Finding(True, key.address, f"signed something at {_told(event)}: {_NO_NAME}")
    told = f"made a signature of sha256 {event.digest} that nothing here bears, at {_told(event)}"
    where = key.address
    if one is not None:
        where, told = one.where, f"{_by(key)} at {_told(event)}, but written at {timestamp(one.written_at)}"
    is_before = one is None or event.time < one.written_at  # what was removed may have been copied back
    is_old = may_be_gone and is_before and (now - event.time).total_seconds() > FLOORS.published_s
    why = _MAY_BE_GONE if is_old else _HIDDEN if one is None else _APART
    return Finding(not is_old, where, f"{told}: {why}")


def _pair(key: AuditedKey, events: Sequence[SignEvent], one: StoredSignature, window: Window) -> Iterator[Finding]:
    """Yields what is wrong with a signature and the events that bear its name, at least one of its time."""
    told = "; ".join(map(_told, events[:_NAMED])) + ("; …" if len(events) > _NAMED else "")
    if len(events) > 1 and any(event.time in window for event in events):
        yield Finding(True, one.where, f"{_by(key)} {len(events)} times by the log: {told}: {_TOO_OFTEN}")
    made_at, times = one.created_at, [event.time for event in events if _is_of_its_time(event, one)]
    if made_at is None or not any(time in window for time in (*times, one.written_at)):
        return
    if made_at - max(times) > SLACK:
        yield Finding(True, one.where, f"{_by(key)} at {told}: {_DATED_LATER} {timestamp(made_at)}")
    if min(times) - made_at > LONGEST:
        yield Finding(True, one.where, f"{_by(key)} at {told}: {_DATED_BEFORE} {timestamp(made_at)}: {_RAN_LONG}")


def _told(event: SignEvent) -> str:
    return f"{timestamp(event.time)} by {event.who}"


def _by(key: AuditedKey) -> str:
    return f"signed by {key.address}"


def _silence(window: Window) -> str:
    return (
        f"the log has nothing of this key from {timestamp(window.since)} to {timestamp(window.until)}, not even the question for "
        "its public key that every audit asks: the trail is off, leaves out KMS or what only reads, is that of another region or "
        "account, or was not given whole (a first audit of a silent key: ask again tomorrow)"
    )


_NO_NAME = "it named no digest, as cachepipe does: what it signed is hidden until its caller shows it"
_HIDDEN = (
    "a hidden signature, unless a publisher died, or lost a race for an index version, between signing and writing, or the "
    "key signs for another store as well"
)
_MAY_BE_GONE = f"more than {FLOORS.published_s / DAY_S:.0f} days ago: gc may have removed the artifact since, which nothing here can tell"
_TOO_OFTEN = "all but one signed something else under this name, unless KMS's answer was lost and asked for again, or a publisher died before it wrote"
_NO_EVENT = (
    "and the log has no event for it right before it was written: it is not whole, or the signature was made elsewhere or earlier "
    "and copied here"
)
_APART = "something else was signed under its name, unless it was copied or put back since"
_DATED_LATER = "but says of itself that it was made later, at"
_DATED_BEFORE = "but says of itself that it was made long before, at"
_RAN_LONG = "something else was signed under its name, unless its build ran that long"
