"""The nightly audit: every signature that KMS made lies in the store, and every one in the store was made by KMS as its log says.

The log is what the KMS of these tests recorded of the requests that it really got; the store is what real command lines left.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import boto3
import pytest
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from cachepipe.adapters import kms as kms_keys
from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.store import TrustChoice, open_store
from cachepipe.cli.main import main
from cachepipe.domain import trust
from cachepipe.domain.index import PAYLOAD_TYPE
from cachepipe.domain.kms_log import Window, claim
from cachepipe.domain.layout import index_key, statement_key
from cachepipe.errors import StoreError, TrustError
from cachepipe.workflows import audit
from cachepipe.workflows.publish import rehearse
from tests.support.kms import REGION, kms_server
from tests.support.restoring import Published, publish_release

ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of the curve P-256: with (r, s) holds (r, ORDER − s)."""
Output = pytest.CaptureFixture[str]
SOON = (datetime.now(timezone.utc) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Site:
    """Keys, a policy and a store of their own in the KMS of this module, and its log."""

    def __init__(self, folder: Path, log: Path, client: Any) -> None:
        self.folder, self.log, self.client = folder, log, client
        self.store = LocalStore(folder / "store")
        self.policy = str(folder / "trust.json")
        self.keys = [f"kms:alias/{folder.name}-{role}" for role in ("statement", "index")]
        for role, key in zip(("statement", "index"), self.keys, strict=True):
            assert main(["keygen", "--role", role, "--key", key, "--policy", self.policy]) == 0
        self.trust = TrustChoice(self.policy, False, *self.keys)

    def publish(self, number: int = 0) -> Published:
        return publish_release(self.folder, number=number, trust=self.trust)

    def run(self, verb: str, *words: str) -> None:
        signed = ["--index-key", self.keys[1], "--trust", self.policy]
        assert main([verb, self.store.url, "--name", "demo", *words, *signed]) == 0

    def age(self, days: int) -> None:
        """Makes what the store holds older, by the store's clock."""
        for path in Path(self.store.root).rglob("*"):
            if path.is_file():
                time = path.stat().st_mtime - days * 86_400
                os.utime(path, (time, time))

    def steal(self, *, key: int = 1, agent: str = "", digest: bytes = b"d" * 32) -> None:
        """Signs as whoever has the role may: with plain boto3 and any User-Agent."""
        thief = boto3.client("kms", config=boto3.session.Config(user_agent_extra=agent))
        sent = {"Message": digest, "MessageType": "DIGEST", "SigningAlgorithm": "ECDSA_SHA_256"}
        thief.sign(KeyId=self.keys[key].removeprefix("kms:"), **sent)

    def arn(self, key: int) -> str:
        return str(self.client.describe_key(KeyId=self.keys[key].removeprefix("kms:"))["KeyMetadata"]["Arn"])

    def records(self) -> list[tuple[Path, dict[str, Any]]]:
        """Returns every record of these keys with its file."""
        found = [(path, json.loads(gzip.decompress(path.read_bytes()))) for path in sorted(self.log.rglob("*.json.gz"))]
        names = {*(key.removeprefix("kms:") for key in self.keys), self.arn(0), self.arn(1)}
        names |= {name.rpartition("/")[2] for name in names if ":key/" in name}
        return [(path, r) for path, tree in found for r in tree["Records"] if r["requestParameters"]["keyId"] in names]

    def signatures(self) -> list[tuple[Path, dict[str, Any]]]:
        found = [(path, r) for path, r in self.records() if r["eventName"] == "Sign" and "errorCode" not in r]
        return sorted(found, key=lambda pair: pair[0].stat().st_mtime_ns)

    def words(self, *more: str, log: Path | None = None, keys: list[str] | None = None) -> list[str]:
        asked = [word for key in keys or self.keys for word in ("--kms-key", key)]
        window = ("--since", "1h", "--until", SOON)
        return [
            "fsck",
            self.store.url,
            "--trust",
            self.policy,
            "--kms-log",
            str(log or self.log),
            *asked,
            *window,
            *more,
        ]

    def audit(self, capsys: Output, *more: str, log: Path | None = None, keys: list[str] | None = None) -> Any:
        """Returns the document of an audit whose exit code is what its findings say."""
        capsys.readouterr()
        code = main(self.words("--json", *more, log=log, keys=keys))
        found = json.loads(capsys.readouterr().out)
        assert code == (13 if [one for one in found["findings"] if one["is_problem"]] else 0)
        return found


def problems(document: Any) -> list[str]:
    return [f"{found['where']}: {found['what']}" for found in document["findings"] if found["is_problem"]]


def counts(document: Any) -> list[tuple[int, int]]:
    return [(key["logged"], key["stored"]) for key in document["keys"]]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("trail")
    with kms_server(folder) as variables:
        yield folder, variables


@pytest.fixture
def site(tmp_path: Path, log: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Site:
    folder, variables = log
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the first keys that it was given for all later tests
    for name, value in {**variables, "AWS_DEFAULT_REGION": REGION}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "CACHEPIPE_TRUST", "CACHEPIPE_STATEMENT_KEY", "CACHEPIPE_INDEX_KEY"):
        monkeypatch.delenv(name, raising=False)
    return Site(tmp_path, folder, boto3.client("kms"))


def digest_of(store: LocalStore, key: str, payload_type: str) -> str:
    opened = trust.open_envelope(store.get(key, 1 << 20) or b"", payload_type, key)
    return hashlib.sha256(trust.pae(opened.payload_type, opened.payload)).hexdigest()


# --- what all went well with ----------------------------------------------------------------------------------------------


def test_a_release_that_was_rehearsed_published_moved_and_renewed_pairs_to_the_unit(site: Site, capsys: Output) -> None:
    rehearse(open_store(site.store.url, site.trust), "demo", "stable", datetime.now(timezone.utc))
    row = site.publish(1).row
    site.publish(2)
    site.run("promote", "--from", "stable", "--to", "canary")
    site.run("renew", "--channel", "stable")
    site.run("rollback", "--channel", "stable")
    site.run("revoke", row.artifact)
    found = site.audit(capsys)
    assert found["findings"] == []
    assert counts(found) == [(2, 2), (7, 7)], (
        "versions 1, 2, renewed, rolled back and revoked of stable; 1 and 2 of canary"
    )
    assert [key["arn"] for key in found["keys"]] == [site.arn(0), site.arn(1)]
    assert main(site.words("--deep")) == 0
    assert f"{site.keys[1]}: 7 signatures in the log, 7 here, from " in capsys.readouterr().err


def test_a_rehearsal_leaves_dry_runs_in_the_log_and_no_signature(site: Site, capsys: Output) -> None:
    rehearse(open_store(site.store.url, site.trust), "demo", "stable", datetime.now(timezone.utc))
    asked = [record.get("errorCode") for _, record in site.records() if record["eventName"] == "Sign"]
    assert asked == ["DryRunOperationException"] * 2
    found = site.audit(capsys)
    assert (problems(found), counts(found)) == ([], [(0, 0), (0, 0)])


def test_a_rehearsal_by_dry_run_refuses_every_key_that_the_policy_would_not_believe(site: Site, tmp_path: Path) -> None:
    def refused(policy: str, *keys: str) -> str:
        choice = TrustChoice(policy, False, *keys)
        with pytest.raises(TrustError) as caught:
            rehearse(open_store(site.store.url, choice), "demo", "stable", datetime.now(timezone.utc))
        return str(caught.value)

    statement, index = site.keys
    assert "may not sign as statement" in refused(site.policy, index, statement)
    assert "may not sign as index" in refused(site.policy, statement, statement)
    whole = json.loads(Path(site.policy).read_text())
    changes = {
        "a key that the policy does not list": {"keys": whole["keys"][:1]},
        f"{whole['keys'][1]['keyid'][:20]} ended at": {
            "keys": [whole["keys"][0], {**whole["keys"][1], "not_after": "2026-01-01T00:00:00Z"}]
        },
    }
    for told, change in changes.items():
        (tmp_path / "other.json").write_text(json.dumps({**whole, **change}))
        assert told in refused(str(tmp_path / "other.json"), statement, index)
    both = {"keys": [{**row, "roles": ["statement", "index"]} for row in whole["keys"]], "thresholds": {"index": 2}}
    (tmp_path / "two.json").write_text(json.dumps({**whole, **both}))
    assert "1 of 2 index signatures count" in refused(str(tmp_path / "two.json"), statement, index)
    assert "1 of 2 index signatures count" in refused(str(tmp_path / "two.json"), statement, f"{index},{index}")
    two = TrustChoice(str(tmp_path / "two.json"), False, statement, f"{statement},{index}")
    rehearse(open_store(site.store.url, two), "demo", "stable", datetime.now(timezone.utc))


@pytest.mark.parametrize("name", ["alias", "id", "ARN", "ARN of the alias"])
def test_a_key_is_the_same_by_every_name_that_signs_and_that_is_asked_for(
    site: Site, capsys: Output, name: str
) -> None:
    arns = [site.arn(number) for number in (0, 1)]
    named = {
        "alias": site.keys,
        "id": [f"kms:{arn.rpartition('/')[2]}" for arn in arns],
        "ARN": [f"kms:{arn}" for arn in arns],
        "ARN of the alias": [
            f"kms:{arn.rpartition(':')[0]}:{key[4:]}" for arn, key in zip(arns, site.keys, strict=True)
        ],
    }[name]
    site.trust = TrustChoice(site.policy, False, *named)
    site.publish()
    for keys in (site.keys, named):
        found = site.audit(capsys, keys=keys)
        assert (problems(found), counts(found)) == ([], [(1, 1), (1, 1)])


def test_keys_in_files_beside_keys_in_kms_are_named_and_need_no_log(site: Site, capsys: Output, tmp_path: Path) -> None:
    file_key = f"file:{tmp_path / 'second.key'}"
    assert main(["keygen", "--role", "index", "--key", str(tmp_path / "second.key"), "--policy", site.policy]) == 0
    site.trust = TrustChoice(site.policy, False, site.keys[0], f"{site.keys[1]},{file_key}")
    rehearse(open_store(site.store.url, site.trust), "demo", "stable", datetime.now(timezone.utc))
    site.publish()
    found = site.audit(capsys)
    assert (problems(found), counts(found)) == ([], [(1, 1), (1, 1)])
    (note,) = found["findings"]
    assert note["what"] == "1 signatures here in this time, and its log was not asked for"


def test_events_that_were_looked_up_are_as_good_as_log_files_and_both_together_count_once(
    site: Site, capsys: Output, tmp_path: Path
) -> None:
    site.publish()
    events = [{"EventId": r["eventID"], "CloudTrailEvent": json.dumps(r)} for _, r in site.records()]
    (tmp_path / "looked-up").write_text(json.dumps({"Events": events}))
    for more in ((), ("--kms-log", str(site.log))):
        found = site.audit(capsys, *more, log=tmp_path / "looked-up")
        assert (problems(found), counts(found)) == ([], [(1, 1), (1, 1)])


# --- what was hidden ------------------------------------------------------------------------------------------------------


def test_a_signature_that_names_nothing_is_found(site: Site, capsys: Output) -> None:
    site.publish()
    site.steal()
    found = site.audit(capsys)
    (problem,) = problems(found)
    assert problem.startswith(f"{site.keys[1]}: signed something at 20") and "named no digest" in problem
    event = site.signatures()[-1][1]
    assert f" by {event['userIdentity']['arn']} from 127.0.0.1 (event {event['eventID']}): " in problem
    assert counts(found) == [(1, 1), (2, 1)]
    assert "disable the key" in found["error"]["hint"]


def test_a_signature_under_the_name_of_another_is_found_by_the_count(site: Site, capsys: Output) -> None:
    site.publish()
    key = index_key("demo", "stable", 1)
    site.steal(agent=claim(digest_of(site.store, key, PAYLOAD_TYPE)))
    (problem,) = problems(site.audit(capsys))
    assert problem.startswith(f"{key}: signed by {site.keys[1]} 2 times by the log: 20")
    assert "all but one signed something else under this name" in problem


def test_a_signature_is_found_under_the_name_of_what_is_older_than_the_log(site: Site, capsys: Output) -> None:
    """A trail's logs are given for some days; a thief names what was published before them, whose own event is not there."""
    site.publish()
    for path, _ in site.signatures():
        path.unlink()
    site.age(10)
    assert site.audit(capsys)["findings"] == []
    key = index_key("demo", "stable", 1)
    site.steal(agent=claim(digest_of(site.store, key, PAYLOAD_TYPE)))
    (problem,) = problems(site.audit(capsys))
    assert problem.startswith(f"{key}: signed by {site.keys[1]} at 20") and ", but written at 20" in problem
    assert "something else was signed under its name" in problem
    # the same by who writes the store as well, at a place that sorts before the first
    assert site.store.put_if_absent(index_key("demo", "a", 1), site.store.get(key, 1 << 20) or b"")
    assert problem in problems(site.audit(capsys))


def test_a_second_form_of_a_signature_is_no_partner_for_what_was_hidden_under_its_name(
    site: Site, capsys: Output
) -> None:
    site.publish()
    first = trust.open_envelope(site.store.get(index_key("demo", "stable", 1), 1 << 20) or b"", PAYLOAD_TYPE, "first")
    site.steal(agent=claim(hashlib.sha256(trust.pae(PAYLOAD_TYPE, first.payload)).hexdigest()))
    (one,) = first.signatures
    r, s = decode_dss_signature(one.sig)
    second = trust.Signature(one.keyid, encode_dss_signature(r, ORDER - s))
    assert site.store.put_if_absent(index_key("demo", "other", 1), trust.seal(first.payload, PAYLOAD_TYPE, [second]))
    found = problems(site.audit(capsys))
    assert len(found) == 2 and any("all but one signed something else under this name" in line for line in found)
    assert any(line.startswith("demo@other:1: ") and "not the one asked for" in line for line in found)


def test_a_signature_that_is_nowhere_is_found_under_its_own_name_and_that_of_another_keys_object(
    site: Site, capsys: Output
) -> None:
    artifact = site.publish().row.artifact
    digests = ["ab" * 32, digest_of(site.store, statement_key(artifact), trust.STATEMENT_PAYLOAD_TYPE)]
    for digest in digests:  # the second is in the store, signed by the other key
        site.steal(agent=claim(digest))
    found = problems(site.audit(capsys))
    assert [line.split(", at 20")[0] for line in found] == [
        f"{site.keys[1]}: made a signature of sha256 {digest} that nothing here bears" for digest in sorted(digests)
    ]
    assert all("a hidden signature, unless a publisher died" in line for line in found)


def test_junk_under_a_keys_name_is_nobodys_partner(site: Site, capsys: Output) -> None:
    site.publish()
    first = trust.open_envelope(site.store.get(index_key("demo", "stable", 1), 1 << 20) or b"", PAYLOAD_TYPE, "first")
    payload = first.payload.replace(b'"version":1', b'"version":2')
    digest = hashlib.sha256(trust.pae(PAYLOAD_TYPE, payload)).hexdigest()
    site.steal(agent=claim(digest))  # over something else; the store gets a version whose signature is none
    assert site.store.put_if_absent(index_key("demo", "stable", 2), trust.seal(payload, PAYLOAD_TYPE, first.signatures))
    found = problems(site.audit(capsys))
    assert any("a signature of key" in line and "is not of these bytes" in line for line in found)
    assert any(f"made a signature of sha256 {digest} that nothing here bears" in line for line in found)


def test_a_publisher_that_died_between_signing_and_writing_is_named_as_that_and_its_next_run_too(
    site: Site, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalStore.put_if_absent

    def die(store: LocalStore, key: str, data: bytes) -> bool:
        if key.startswith("v1/index/"):
            raise StoreError("the network is gone")
        return put(store, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put_if_absent", die)
        with pytest.raises(StoreError):
            site.publish()
    (problem,) = problems(site.audit(capsys))
    assert "that nothing here bears" in problem and "unless a publisher died" in problem
    site.publish()
    found = site.audit(capsys)
    assert (problems(found), counts(found)) == ([problem], [(2, 2), (2, 1)])


def test_an_answer_that_was_lost_and_asked_for_again_is_reported_as_that(
    site: Site, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign, lost = kms_keys.KmsKey.sign, []

    def ask_twice(key: kms_keys.KmsKey, message: bytes) -> bytes:
        lost.append(sign(key, message))
        return sign(key, message)

    with monkeypatch.context() as patch:
        patch.setattr(kms_keys.KmsKey, "sign", ask_twice)
        site.publish()
    found = problems(site.audit(capsys))
    assert len(found) == len(lost) == 2
    assert all(" 2 times by the log: " in line and "unless KMS's answer was lost" in line for line in found)


# --- a log that is not whole ----------------------------------------------------------------------------------------------


def test_a_log_with_a_gap_is_told_by_every_object_that_it_does_not_explain(site: Site, capsys: Output) -> None:
    artifact = site.publish().row.artifact
    for path, _ in site.signatures():
        path.unlink()
    assert problems(site.audit(capsys)) == [
        f"{key}: signed by {by}, and the log has no event for it right before it was written: it is not whole, or the signature was made elsewhere or "
        "earlier and copied here"
        for key, by in zip((statement_key(artifact), index_key("demo", "stable", 1)), site.keys, strict=True)
    ]


def test_a_log_that_takes_an_hour_to_read_makes_nothing_older(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.publish()
    now = datetime.now(timezone.utc)
    store = open_store(site.store.url, site.trust)
    request = audit.AuditRequest([site.log], site.keys, Window(now - timedelta(hours=9), now + timedelta(hours=1)))
    clock = iter((0.0, 7200.0))
    monkeypatch.setattr(audit, "monotonic", lambda: next(clock))
    assert audit.audit(store, request, now - timedelta(hours=2)).findings == ()


def test_a_log_that_says_nothing_of_a_key_is_no_clean_audit(site: Site, capsys: Output, tmp_path: Path) -> None:
    (tmp_path / "silent.json").write_text('{"Records": []}')
    site.publish()
    found = problems(site.audit(capsys, log=tmp_path / "silent.json"))
    silent = [line for line in found if "the log has nothing of this key" in line]
    assert len(found) == 4 and [line.split(": ")[0] for line in silent] == sorted(site.keys)
    assert "the trail is off, leaves out KMS or what only reads" in silent[0]
    assert site.audit(capsys)["findings"] == [], "each audit's own question is in the log of the next"


def test_what_lies_outside_of_the_window_needs_no_partner(site: Site, capsys: Output) -> None:
    site.publish()
    site.steal()
    assert len(problems(site.audit(capsys))) == 1
    for path, record in site.signatures():
        tree = {"Records": [{**record, "eventTime": "2026-01-01T00:00:00Z"}]}
        path.write_bytes(gzip.compress(json.dumps(tree).encode()))
    assert len(problems(site.audit(capsys))) == 2, "what was written in the window was not signed months before"
    site.age(10)
    found = site.audit(capsys)
    assert (problems(found), counts(found)) == ([], [(0, 0), (0, 0)])


def test_a_statement_of_long_ago_may_have_been_removed_and_an_index_version_never_is(
    site: Site, capsys: Output
) -> None:
    site.publish()
    past = (datetime.now(timezone.utc) - timedelta(days=40)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for key in (0, 1):
        site.steal(key=key, agent=claim("cd" * 32))
    for path, record in site.signatures()[-2:]:
        path.write_bytes(gzip.compress(json.dumps({"Records": [{**record, "eventTime": past}]}).encode()))
    found = site.audit(capsys, "--since", "60d")["findings"]
    assert [(one["where"], one["is_problem"]) for one in found] == [(site.keys[1], True), (site.keys[0], False)]
    assert "gc may have removed the artifact since" in found[1]["what"]
    assert site.audit(capsys)["findings"] == []


# --- the command line -----------------------------------------------------------------------------------------------------


def test_nothing_that_a_terminal_obeys_is_printed_of_a_log(site: Site, capsys: Output) -> None:
    site.publish()
    site.steal()
    path, record = site.signatures()[-1]
    breaks = "\r\nproblem\u2028error: \u2029error: \x85error: \x0berror: "
    odd = {"userIdentity": {"arn": f"\x1b[2J\u202e\ud800{breaks}"}, "sourceIPAddress": "\x9b1m", "eventID": "\r\x07"}
    path.write_bytes(gzip.compress(json.dumps({"Records": [{**record, **odd}]}).encode()))
    for more in ((), ("--json",)):
        capsys.readouterr()
        assert main(site.words(*more)) == 13
        out, err = capsys.readouterr()
        told = out + err
        assert [line.split(":")[0] for line in err.split("\n")].count("error") == 1
        assert more or [line.split()[0] for line in out.split("\n") if line] == ["problem"]
        assert not more or [one["what"].isprintable() for one in json.loads(out)["findings"]] == [True]
        assert "named no digest" in told
        assert all(char.isprintable() or char == "\n" for char in told), more


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--kms-log", "LOG"], 2, "an audit wants both"),
        (["--kms-key", "kms:alias/x"], 2, "an audit wants both"),
        (["--kms-log", "/nowhere", "--kms-key", "KEY"], 2, "no such file: /nowhere"),
        (["--kms-log", "LOG", "--kms-key", "file:/k"], 2, "not a key in KMS"),
        (["--kms-log", "LOG", "--kms-key", "kms:alias/none"], 14, "there is no KMS key alias/none"),
        (["--kms-log", "LOG", "--kms-key", "KEY", "--since", "yesterday"], 2, "not a time: 'yesterday'"),
        (["--kms-log", "LOG", "--kms-key", "KEY", "--since", "10m"], 2, "--since 10m is not before --until 30m"),
        (["--kms-log", "STORE", "--kms-key", "KEY"], 13, "not a log of CloudTrail"),
        (["--kms-log", "EMPTY", "--kms-key", "KEY"], 2, "no log file"),
    ],
)
def test_what_cannot_be_audited_is_an_error_that_says_why(
    site: Site, capsys: Output, tmp_path: Path, words: list[str], code: int, told: str
) -> None:
    site.publish()
    (tmp_path / "nothing").mkdir()
    names = {
        "LOG": str(site.log),
        "KEY": site.keys[0],
        "STORE": f"{site.store.root}/v1",
        "EMPTY": str(tmp_path / "nothing"),
    }
    assert main(["fsck", site.store.url, "--trust", site.policy, *(names.get(word, word) for word in words)]) == code
    assert told in capsys.readouterr().err


def test_by_default_the_day_up_to_half_an_hour_ago_counts(site: Site, capsys: Output) -> None:
    site.publish()
    site.steal()
    words = [
        "fsck",
        site.store.url,
        "--trust",
        site.policy,
        "--kms-log",
        str(site.log),
        "--kms-key",
        site.keys[1],
        "--json",
    ]
    assert main(words) == 13, "of the window, which ends half an hour ago, a log of a minute has nothing"
    (found,) = json.loads(capsys.readouterr().out)["keys"]
    since, until = (datetime.fromisoformat(found[name].removesuffix("Z") + "+00:00") for name in ("since", "until"))
    assert until - since == timedelta(days=1)
    assert abs(datetime.now(timezone.utc) - until - timedelta(minutes=30)) < timedelta(minutes=5)
    assert (found["logged"], found["stored"]) == (0, 0)


def test_files_that_are_passed_over_are_a_note(site: Site, capsys: Output, tmp_path: Path) -> None:
    site.publish()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/looked-up.txt").write_text("{}")
    found = site.audit(capsys, "--kms-log", str(site.log), log=site.signatures()[0][0])
    assert found["findings"] == []
    (tmp_path / "logs/silent.json").write_text('{"Records": []}')
    (note,) = site.audit(capsys, "--kms-log", str(tmp_path / "logs"))["findings"]
    assert (note["is_problem"], note["where"]) == (False, "logs")
    assert note["what"] == f"1 files are not named as logs are (`*.json`, `*.json.gz`): {tmp_path}/logs/looked-up.txt"


def test_a_variable_with_a_key_alone_asks_for_no_audit_and_serves_one_that_is_asked_for(
    site: Site, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish()
    words = ["fsck", site.store.url, "--trust", site.policy]
    monkeypatch.setenv("CACHEPIPE_KEY", "file:/of/keygen")
    assert main(words) == 0
    monkeypatch.setenv("CACHEPIPE_KMS_KEY", " ".join(site.keys))
    assert main(words) == 0
    window = ["--kms-log", str(site.log), "--since", "1h", "--until", SOON]
    capsys.readouterr()
    assert main([*words, *window, "--json"]) == 0
    assert counts(json.loads(capsys.readouterr().out)) == [(1, 1), (1, 1)]
    monkeypatch.delenv("CACHEPIPE_KMS_KEY")
    assert main([*words, *window]) == 2
