"""A log of KMS and the signatures of a store pair one to one, whatever the log says and in whatever order it says it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachepipe.domain.finding import Finding
from cachepipe.domain.index import timestamp
from cachepipe.domain.kms_log import (
    LONGEST,
    SLACK,
    TO_WRITE,
    AuditedKey,
    KmsLog,
    LogLimits,
    StoredSignature,
    Window,
    claim,
    compare,
)
from cachepipe.errors import IntegrityError

NOW = datetime(2026, 11, 30, 10, 0, 0, tzinfo=timezone.utc)
WINDOW = Window(NOW - timedelta(hours=25), NOW - timedelta(hours=1))
MIDDLE = NOW - timedelta(hours=12)
ACCOUNT = "arn:aws:kms:eu-west-1:111122223333"
KEY = AuditedKey("kms:alias/build", f"{ACCOUNT}:key/1234abcd-12ab-34cd-56ef-1234567890ab", "k" * 64)
OTHER = AuditedKey("kms:alias/other", f"{ACCOUNT}:key/0987dcba-09fe-87dc-65ba-ab0987654321", "o" * 64)


def digest(number: int) -> str:
    return f"{number:064x}"


def record(name: str = "", time: datetime = MIDDLE, **fields: Any) -> dict[str, Any]:
    """Returns one record of Sign by `KEY`, with the fields of the developer guide's example that are read."""
    record.count = getattr(record, "count", 0) + 1  # type: ignore[attr-defined]
    found = {
        "eventSource": "kms.amazonaws.com",
        "eventName": "Sign",
        "eventTime": timestamp(time),
        "eventID": f"event-{record.count}",  # type: ignore[attr-defined]
        "userAgent": f"Boto3/1.44 md/Botocore#1.44 {claim(name)}" if name else "aws-cli/2",
        "userIdentity": {"arn": "arn:aws:iam::111122223333:user/Alice"},
        "sourceIPAddress": "192.0.2.0",
        "requestParameters": {"keyId": "alias/build", "messageType": "DIGEST"},
        "resources": [{"type": "AWS::KMS::Key", "ARN": KEY.arn}],
        **fields,
    }
    return {field: value for field, value in found.items() if value is not None}


HEARD = record(eventName="GetPublicKey")


def log_of(*records: Any, window: Window = WINDOW) -> KmsLog:
    log = KmsLog([KEY, OTHER], window)
    log.add(json.dumps({"Records": [HEARD, *records]}).encode(), "log")
    return log


def stored(
    number: int, time: datetime = MIDDLE, where: str = "", created_at: datetime | None = None
) -> StoredSignature:
    return StoredSignature(KEY.keyid, digest(number), where or f"v1/{number}", time, created_at)


def found(*records: Any, held: tuple[StoredSignature, ...] = (), may_be_gone: bool = True) -> list[Finding]:
    return list(compare(KEY, log_of(*records), held, WINDOW, NOW, may_be_gone=may_be_gone))


def said(*records: Any, held: tuple[StoredSignature, ...] = (), is_problem: bool = True) -> str:
    (finding,) = found(*records, held=held)
    assert finding.is_problem == is_problem
    return f"{finding.where}: {finding.what}"


# --- which records count --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"requestParameters": {"keyId": KEY.arn}},
        {"resources": None, "requestParameters": {"keyId": KEY.arn}},
        {"resources": None, "requestParameters": {"keyId": "1234abcd-12ab-34cd-56ef-1234567890ab"}},
        {"resources": None},
        {"resources": None, "requestParameters": {"keyId": f"{ACCOUNT}:alias/build"}},
        {"resources": [], "userIdentity": {"type": "AWSService"}},
        {"resources": [{"type": "AWS::KMS::Key", "ARN": KEY.arn}], "requestParameters": {"keyId": "alias/other"}},
        {"errorCode": None, "errorMessage": None},
        {"errorCode": ""},
        {"userIdentity": None, "sourceIPAddress": None},
        {"userAgent": None},
    ],
)
def test_a_signature_counts_by_whatever_name_the_record_calls_its_key(fields: dict[str, Any]) -> None:
    assert len(log_of(record(digest(1), **fields)).events[KEY.keyid]) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"eventName": "GetPublicKey"},
        {"eventName": "Verify"},
        {"eventSource": "s3.amazonaws.com"},
        {"eventSource": None},
        {"errorCode": "DryRunOperationException"},
        {"errorCode": "AccessDenied", "resources": None},
        {"resources": [{"ARN": OTHER.arn}], "requestParameters": {"keyId": "alias/build"}},
        {"resources": None, "requestParameters": {"keyId": "55555555-12ab-34cd-56ef-1234567890ab"}},
        {"resources": [{"ARN": KEY.arn.replace("eu-west-1", "us-east-1")}]},
    ],
)
def test_what_signed_nothing_or_with_another_key_does_not_count(fields: dict[str, Any]) -> None:
    assert log_of(record(digest(1), **fields)).events[KEY.keyid] == []


@pytest.mark.parametrize(
    "key",
    [
        None,
        {},
        {"keyId": "alias/third"},
        {"keyId": 7},
        {"keyId": f"{ACCOUNT}:alias/third"},
        {"keyId": "arn:aws:kms:eu-west-1:444455556666:alias/build"},
    ],
)
def test_a_signature_by_nobody_knows_which_key_is_no_whole_log(key: Any) -> None:
    with pytest.raises(IntegrityError, match="does not tell its key"):
        log_of(record(resources=None, requestParameters=key))


def test_a_multi_region_key_signs_in_every_region() -> None:
    arns = [f"arn:aws:kms:{region}:111122223333:key/mrk-1234" for region in ("eu-west-1", "us-east-1")]
    log = KmsLog([KEY._replace(arn=arns[0])], WINDOW)
    log.add(json.dumps({"Records": [record(resources=[{"ARN": arn}]) for arn in arns]}).encode(), "log")
    assert len(log.events[KEY.keyid]) == 2


@pytest.mark.parametrize(
    ("agent", "named"),
    [
        (claim(digest(1)), digest(1)),
        (f"x {claim(digest(1))} y", digest(1)),
        (f"[x {claim(digest(1))}]", ""),
        (f"x{claim(digest(1))}", ""),
        (claim(digest(1))[:-1], ""),
        (claim(digest(1)) + "0", ""),
        (claim("A" * 64), ""),
        (f"{claim(digest(1))} {claim(digest(2))}", ""),
        ("", ""),
    ],
)
def test_a_name_is_taken_whole_and_alone_or_not_at_all(agent: str, named: str) -> None:
    (event,) = log_of(record(userAgent=agent)).events[KEY.keyid]
    assert event.digest == named


def test_an_event_counts_once_in_however_many_files_and_accounts() -> None:
    one, shared = record(digest(1)), [record(digest(2), sharedEventID="shared") for _ in range(2)]
    assert len(log_of(one, one, *shared).events[KEY.keyid]) == 2


# --- pairing --------------------------------------------------------------------------------------------------------------


def test_one_event_to_one_signature_is_no_finding() -> None:
    assert found() == []
    assert found(*(record(digest(n)) for n in range(3)), held=tuple(map(stored, range(3)))) == []


def test_every_way_not_to_pair_has_its_sentence() -> None:
    assert "named no digest" in said(record())
    nowhere = said(record(digest(7)))
    assert f"made a signature of sha256 {digest(7)} that nothing here bears, at 20" in nowhere
    assert "a hidden signature, unless a publisher died" in nowhere
    twice = said(record(digest(1)), record(digest(1)), held=(stored(1),))
    assert twice.startswith("v1/1: signed by kms:alias/build 2 times by the log: 2026-11-29T22:00:00Z by arn:")
    assert said(held=(stored(1),)).startswith("v1/1: signed by kms:alias/build, and the log has no event for it")


def test_a_signature_stands_for_one_event_wherever_and_however_often_it_lies() -> None:
    held = (stored(1, where="v1/b"), stored(1, where="v1/a"))
    assert found(record(digest(1)), held=held) == []
    assert said(record(digest(1)), record(digest(1)), held=held).startswith("v1/a: signed by kms:alias/build 2 times")


def test_a_log_that_is_silent_in_the_window_is_a_problem_and_a_refusal_is_no_silence() -> None:
    before = record(eventName="GetPublicKey", time=WINDOW.since - SLACK)
    for records, is_silent in (
        ([before], True),
        ([record(errorCode="AccessDenied")], False),
        ([record(errorCode="x", resources=[{"ARN": OTHER.arn}])], True),
    ):
        log = KmsLog([KEY], WINDOW)
        log.add(json.dumps({"Records": records}).encode(), "log")
        told = [finding.what for finding in compare(KEY, log, (), WINDOW, NOW, may_be_gone=True)]
        assert [text.startswith("the log has nothing of this key from 2026-11-29T09:00:00Z") for text in told] == (
            [True] if is_silent else []
        )


SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("time", "counts"),
    [(WINDOW.since, True), (WINDOW.since - SECOND, False), (WINDOW.until, True), (WINDOW.until + SECOND, False)],
)
def test_an_event_needs_a_partner_within_the_window(time: datetime, counts: bool) -> None:
    assert bool(found(record(time=time))) == counts
    assert bool(found(record(digest(1), time))) == counts
    double = found(*(record(digest(1), time) for _ in range(2)), held=(stored(1, time),))
    assert bool(double) == counts


@pytest.mark.parametrize(
    ("time", "counts"),
    [
        (WINDOW.since + SLACK, True),
        (WINDOW.since + SLACK - SECOND, False),
        (WINDOW.until - SLACK, True),
        (WINDOW.until - SLACK + SECOND, False),
    ],
)
def test_an_object_needs_an_event_within_the_window_but_for_the_difference_of_clocks(
    time: datetime, counts: bool
) -> None:
    assert bool(found(held=(stored(1, time),))) == counts


@pytest.mark.parametrize(
    ("after", "is_told"),
    [
        (timedelta(days=-400), True),
        (-SLACK - SECOND, True),
        (-SLACK, False),
        (timedelta(0), False),
        (TO_WRITE + SLACK, False),
        (TO_WRITE + SLACK + SECOND, True),
        (timedelta(days=400), True),
    ],
)
def test_what_was_not_written_right_after_its_signature_is_no_partner(after: timedelta, is_told: bool) -> None:
    """A thief names what lies here and whose own event is older than the logs; or writes what was signed long ago."""
    of_the_event = [
        one for one in found(record(digest(1)), held=(stored(1, MIDDLE + after),)) if "but written at" in one.what
    ]
    assert [(one.is_problem, one.where) for one in of_the_event] == [(True, "v1/1")] * is_told
    told = found(record(digest(1), MIDDLE - after), held=(stored(1),))
    of_the_object = [one for one in told if "no event for it right before it was written" in one.what]
    assert [(one.is_problem, one.where) for one in of_the_object] == [(True, "v1/1")] * is_told


def test_a_partner_may_lie_just_outside_of_the_window() -> None:
    edge, beyond = WINDOW.since, WINDOW.since - SLACK
    assert found(record(digest(1), edge), held=(stored(1, beyond),)) == []
    assert found(record(digest(1), edge - TO_WRITE), held=(stored(1, edge + SLACK),)) == []
    assert found(record(digest(1), WINDOW.until), held=(stored(1, WINDOW.until + TO_WRITE),)) == []


def test_a_signature_is_of_the_time_when_it_was_first_written_however_late_and_wherever_it_is_written_again() -> None:
    """A thief copies what lies here to a name that sorts first, and signs under its name."""
    old = MIDDLE - timedelta(days=10)
    for where in ("v1/a", "v1/z"):
        held = (stored(1, old, where="v1/m"), stored(1, where=where))
        assert "but written at 2026-11-19T22:00:00Z" in said(record(digest(1)), held=held)


def test_a_text_that_was_put_back_is_no_partner_for_what_was_signed_long_after_its_date() -> None:
    """A thief removes what lies here, writes it anew, and signs under its name."""
    for age, is_told in ((LONGEST, False), (LONGEST + SECOND, True), (timedelta(days=90), True)):
        told = found(record(digest(1)), held=(stored(1, created_at=MIDDLE - age),))
        assert [("made long before, at" in finding.what) for finding in told] == [True] * is_told


def test_two_events_of_one_name_share_no_partner_though_one_is_of_another_time_and_before_the_window() -> None:
    """A thief removes what was written some hours ago, writes it anew, and signs under its name."""
    for hours in (3, 20):
        first = MIDDLE - timedelta(hours=hours)
        told = said(record(digest(1), first), record(digest(1)), held=(stored(1, created_at=first),))
        assert told.startswith("v1/1: signed by kms:alias/build 2 times by the log: ")
    assert MIDDLE - timedelta(hours=20) not in WINDOW


def test_what_gc_removed_and_someone_copied_back_is_a_note_and_a_signature_after_the_object_never_is() -> None:
    wide = Window(NOW - timedelta(days=60), NOW)
    for written, is_problem in ((timedelta(days=3), False), (timedelta(days=50), True)):
        log = log_of(record(digest(1), NOW - timedelta(days=40)), window=wide)
        told = list(compare(KEY, log, (stored(1, NOW - written),), wide, NOW, may_be_gone=True))
        own = [one for one in told if "but written at" in one.what]
        assert [one.is_problem for one in own] == [is_problem]


def test_what_gc_may_have_removed_is_a_note_and_an_index_version_never_is() -> None:
    wide = Window(NOW - timedelta(days=60), NOW)
    for days, may_be_gone, is_problem in ((29, True, True), (31, True, False), (31, False, True)):
        log = log_of(record(digest(1), NOW - timedelta(days=days)), window=wide)
        (finding,) = compare(KEY, log, (), wide, NOW, may_be_gone=may_be_gone)
        assert finding.is_problem == is_problem
        assert ("gc may have removed the artifact since" in finding.what) != is_problem
    log = log_of(record(time=NOW - timedelta(days=31)), window=wide)
    (unnamed,) = compare(KEY, log, (), wide, NOW, may_be_gone=True)
    assert unnamed.is_problem, "nothing of ours signs without a name"


def test_a_signature_of_what_says_that_it_was_made_later_is_told() -> None:
    for created_at, is_told in (
        (MIDDLE + SLACK + SECOND, True),
        (datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc), True),
        (MIDDLE + SLACK, False),
        (MIDDLE - LONGEST, False),
    ):
        told = found(record(digest(1)), held=(stored(1, created_at=created_at),))
        assert [("made later, at" in finding.what) for finding in told] == [True] * is_told
    later = MIDDLE + SLACK
    again = found(record(digest(1)), record(digest(1), later), held=(stored(1, created_at=later + SLACK),))
    assert ["2 times by the log" in finding.what for finding in again] == [True], "the later one may have made it"
    old = WINDOW.since - SECOND
    assert found(record(digest(1), old), held=(stored(1, old, created_at=NOW),)) == [], "was told in its night"


@given(st.data())
def test_the_number_of_hidden_signatures_is_the_number_of_events_beyond_those_of_the_store(data: st.DataObject) -> None:
    """However a thief names what he signs, every signature that is not in the store is found, and none more."""
    honest = data.draw(st.integers(0, 5))
    names = data.draw(st.lists(st.one_of(st.just(""), st.integers(0, 9).map(digest)), max_size=6))
    records = [record(digest(n)) for n in range(honest)] + [record(name) for name in names]
    told = found(*data.draw(st.permutations(records)), held=tuple(map(stored, range(honest))))
    assert all(finding.is_problem for finding in told)
    beyond = [name for name in names if name in map(digest, range(honest))]
    assert len(told) == len(names) - len(beyond) + len(set(beyond))
    assert bool(told) == bool(names)


THIEF = {"arn": "the thief"}
minutes = st.integers(-500 * 1440, 0).map(lambda number: NOW + timedelta(minutes=number))
brief = st.integers(-4, 50).map(lambda number: timedelta(minutes=number))


@given(st.data())
def test_no_signature_of_the_window_hides_behind_any_object_of_any_time(data: st.DataObject) -> None:
    """The log reaches a day beyond the window; what lies in the store may be older, copied, put back, or younger."""
    held, records, removes = [], [], data.draw(st.booleans())
    for number, signed_at in enumerate(data.draw(st.lists(minutes, min_size=1, max_size=4))):
        written_at, dated = signed_at + data.draw(brief), signed_at - timedelta(hours=data.draw(st.integers(0, 23)))
        held.append(stored(number, written_at, created_at=dated if removes else None))
        if signed_at >= WINDOW.since - LONGEST:
            records.append(record(digest(number), signed_at))
    assert found(*records, held=tuple(held)) == []
    thefts = data.draw(st.integers(0, 2))
    for _ in range(thefts):
        time = WINDOW.since + timedelta(minutes=data.draw(st.integers(0, 1440)))
        one = data.draw(st.sampled_from(held))
        records.append(record(data.draw(st.sampled_from([one.digest, "", digest(9)])), time, userIdentity=THIEF))
        if one.written_at <= time and data.draw(st.booleans()):  # what nobody signed yet nobody can write
            held = [other for other in held if not (removes and other.digest == one.digest)]
            held.append(
                one._replace(where=data.draw(st.sampled_from(["v1/-", "v1/z"])), written_at=time + data.draw(brief))
            )
    told = found(*records, held=tuple(held))
    assert any(finding.is_problem and THIEF["arn"] in finding.what for finding in told) == bool(thefts)


# --- logs that are none ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xff\xfe", b"null", b"[]", b"{}", b'"Records"', b'{"Records": {}}', b'{"Records": [1]}', b'{"Records": [null]}',
        b'{"Events": [{}]}', b'{"Events": [null]}', b'{"Events": [{"CloudTrailEvent": 1}]}', b'{"Events": [{"CloudTrailEvent": "[]"}]}',
        b'{"Records": [', b"[" * 100_000, b'{"Records": ' + b"[" * 100_000, b'{"Records": [' + b"9" * 5000 + b"]}",
        b'{"digestStartTime": "x", "logFiles": []}', b"v1/index", b"\0" * 100,
        b'{"Records": [], "Events": []}', b'{"Records": [], "Records": []}', b'{"Events": [], "x": {"a": 1, "\\u0061": 1}}',
        b'{"Records": [{"eventName": "Sign", "eventName": "Verify"}]}',
        b'{"Events": [{"CloudTrailEvent": "{\\"eventName\\": 1, \\"eventName\\": 2}"}]}',
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(IntegrityError, match="the file: not a log of CloudTrail") as caught:
        KmsLog([KEY], WINDOW).add(text, "the file")
    assert "validate-logs" in caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [{"eventTime": None}, {"eventTime": "yesterday"}, {"eventTime": 7}, {"eventID": None}, {"eventID": ["x"]}],
)
def test_a_record_of_a_signature_that_is_not_whole_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=r"^log: ") as caught:
        log_of(record(digest(1), **fields))
    assert "validate-logs" in caught.value.hint


def test_records_of_other_services_may_hold_what_they_like() -> None:
    theirs = '{"eventSource": "x", "n": 99999999999999999999, "m": NaN, "t": "\\ud800"}'
    text = f'{{"Records": [{theirs}, {json.dumps(HEARD)}]}}'
    log = KmsLog([KEY], WINDOW)
    log.add(text.encode(), "log")
    assert log.heard == {KEY.keyid}


def test_signatures_are_bounded() -> None:
    log = KmsLog([KEY], WINDOW, LogLimits(events=3))
    records = [record() for _ in range(4)]
    log.add(json.dumps({"Records": records[:3] * 2}).encode(), "log")
    with pytest.raises(IntegrityError, match="too many signatures"):
        log.add(json.dumps({"Records": records[3:]}).encode(), "log")


@pytest.mark.parametrize("text", ["0,", "[],", "{},", '{"":0},', '",",'])
def test_values_are_counted_before_they_are_parsed_in_files_and_in_the_texts_of_events(text: str) -> None:
    limits = LogLimits(values=200)
    whole = f'{{"x": [{text * 201}0], "Records": []}}'
    event = "".join(
        f"\\u{ord(char):04x}" for char in f"[{text * 201}0]"
    )  # whose commas the text around it does not show
    for given_text in (whole, f'{{"Events": [{{"CloudTrailEvent": "{event}"}}]}}'):
        with pytest.raises(IntegrityError, match="log: too many values: wanted <= 200"):
            KmsLog([KEY], WINDOW, limits).add(given_text.encode(), "log")
    KmsLog([KEY], WINDOW, limits).add(f'{{"x": [{"0," * 150}0], "Records": []}}'.encode(), "log")


def test_what_the_log_says_of_a_caller_is_one_line() -> None:
    odd = "a\r\nb\u2028c\u2029d\x85e\x0bf\x1b[2J\u202e"
    for told in (
        said(record(userIdentity={"arn": odd}, sourceIPAddress=odd, eventID=odd)),
        said(record(digest(7), userIdentity={"invokedBy": odd})),
        said(record(digest(1), userIdentity={"type": odd}), record(digest(1)), held=(stored(1),)),
    ):
        assert told.isprintable() and "a\\r\\nb\\u2028c" in told


json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(record())), json_trees, max_size=4))
def test_no_record_makes_the_reader_fail_in_another_way_than_by_its_own_error(fields: dict[str, Any]) -> None:
    try:
        log_of(record(digest(1), **fields))
    except IntegrityError:
        pass


def test_what_a_caller_chose_is_shown_cut_and_so_is_what_one_did_a_thousand_times() -> None:
    (finding,) = found(record(userIdentity={"arn": "a" * 5000}, sourceIPAddress="b" * 5000))
    assert len(finding.what) < 1000
    (finding,) = found(*(record(digest(1)) for _ in range(1000)), held=(stored(1),))
    assert "1000 times by the log" in finding.what and len(finding.what) < 1000
