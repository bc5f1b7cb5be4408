"""Signatures through the real command line: what a service starts with under which policy, and what it says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cachepipe.adapters.local_store import LocalStore
from cachepipe.domain import trust
from cachepipe.domain.index import PAYLOAD_TYPE, Index, index_bytes, timestamp
from cachepipe.domain.layout import hint_key, index_key, statement_key
from cachepipe.domain.marker import read_marker
from cachepipe.domain.policy import ChannelRule, Policy
from cachepipe.domain.record import canonical_bytes
from cachepipe.workflows.channels import promote, renew, revoke
from cachepipe.workflows.fetch import read_channel
from tests.support import authority
from tests.support.authority import key, policy, write_policy
from tests.support.restoring import (
    Published,
    command,
    environment,
    files_below,
    publish_release,
    restore_words,
    run_restore,
    service_environment,
)

STARTED = command(["echo", "started"])


@pytest.fixture
def demo(tmp_path: Path) -> Published:
    """A release that was signed with the keys `s` and `i`."""
    return publish_release(tmp_path, trust=authority.choice(tmp_path / "keys"))


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_policy(tmp_path / "trust.json")


def words(release: Published, *more: str) -> tuple[str, ...]:
    return (release.store.url, "--name", release.name, "--dest", release.root, *more)


def test_a_signed_release_is_restored_and_present_under_its_policy(tmp_path: Path, demo: Published, file: str) -> None:
    for outcome in ("restored", "present"):
        ran = run_restore(tmp_path, *words(demo, "--trust", file), *STARTED)
        assert (ran.out, ran.line["outcome"], ran.line["trust"]) == ("started\n", outcome, "signed")
    assert files_below(demo.root) == demo.restored_bytes(demo.root)


def test_the_policy_can_be_named_by_a_variable(tmp_path: Path, demo: Published, file: str) -> None:
    ran = run_restore(tmp_path, *words(demo), *STARTED, env=environment(tmp_path, CACHEPIPE_TRUST=file))
    assert ran.line["trust"] == "signed"


def test_without_its_policy_a_folder_store_does_not_believe_foreign_keys(tmp_path: Path, demo: Published) -> None:
    ran = run_restore(tmp_path, *words(demo), *STARTED)
    assert (ran.out, ran.line["outcome"]) == ("started\n", "cold")
    assert "no trust policy says whose signatures count" in ran.line["reason"]
    assert run_restore(tmp_path, *words(demo, "--strict"), *STARTED).code == 14


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (policy(key("stranger", "statement", "index")), "by a key that the policy does not list"),
        (policy(key("i", "statement"), key("s", "index")), "may not sign as index"),
        (policy(channels={"stable": ChannelRule(5)}), "the trust policy wants 5 or later"),
        (policy(key("i", "index"), key("i2", "index"), thresholds={"index": 2}), "1 of 2 index signatures count"),
        (policy(key("s", "statement"), key("i", "index", not_after="2026-01-01T00:00:00Z")), "ended at 2026-01-01"),
        (policy(key("i", "index")), "0 of 1 statement signatures count"),
    ],
)
def test_what_the_policy_does_not_allow_is_a_cold_start_with_the_reason(
    tmp_path: Path, demo: Published, chosen: Policy, reason: str
) -> None:
    file = write_policy(tmp_path / "other.json", chosen)
    ran = run_restore(tmp_path, *words(demo, "--trust", file), *STARTED)
    assert (ran.code, ran.out, ran.line["outcome"]) == (0, "started\n", "cold")
    assert reason in ran.line["reason"]
    assert not os.path.exists(demo.root)
    assert run_restore(tmp_path, *words(demo, "--trust", file, "--strict"), *STARTED).code == 14


def test_a_policy_that_cannot_be_used_is_never_no_policy(tmp_path: Path, demo: Published) -> None:
    (tmp_path / "broken.json").write_text("{}")
    Path(write_policy(tmp_path / "open.json")).chmod(0o666)
    for name in ("broken.json", "open.json", "absent.json"):
        ran = run_restore(tmp_path, *words(demo, "--trust", str(tmp_path / name), "--strict"), *STARTED)
        assert (ran.code, ran.out) == (14, "")
        assert name in ran.line["reason"]


# --- unsigned ------------------------------------------------------------------------------------------------------------


def strip_signatures(release: Published) -> None:
    """Makes the channel's newest version one that nobody signed, as an attacker would."""
    store = LocalStore(release.store.root)
    path = Path(store.root, index_key("demo", "stable", 1))
    opened = trust.open_envelope(path.read_bytes(), PAYLOAD_TYPE, "x")
    path.write_bytes(trust.seal(opened.payload, PAYLOAD_TYPE))


def test_case_j3_unsigned_is_refused_with_a_policy_and_without_one(tmp_path: Path, demo: Published, file: str) -> None:
    strip_signatures(demo)
    for more in ((), ("--trust", file)):
        ran = run_restore(tmp_path, *words(demo, "--strict", *more))
        assert ran.code == 14
        assert "unsigned" in ran.line["reason"]


def test_insecure_unsigned_starts_and_warns_each_time(tmp_path: Path, demo: Published) -> None:
    strip_signatures(demo)
    for outcome in ("restored", "present"):
        ran = run_restore(tmp_path, *words(demo, "--insecure-unsigned"), *STARTED)
        assert (ran.out, ran.line["outcome"]) == ("started\n", outcome)
        assert "warning: --insecure-unsigned" in ran.err
    assert ran.line["trust"] == "unchecked signatures"
    ran = run_restore(tmp_path, *words(demo, "--strict"))
    assert ran.code == 14, "what was restored unsigned is not present for a start that asks for signatures"


def test_case_j3_insecure_unsigned_is_refused_by_a_policy_file(tmp_path: Path, demo: Published, file: str) -> None:
    run_restore(tmp_path, *words(demo, "--trust", file))
    for more in (words(demo), (*words(demo), "--lock", demo.lock)):
        ran = run_restore(tmp_path, *more, "--trust", file, "--insecure-unsigned", "--strict")
        assert ran.code == 14
        assert "`--insecure-unsigned` is refused" in ran.line["reason"]


# --- a folder that is there, under another policy ------------------------------------------------------------------------


def test_under_another_policy_the_kept_envelope_is_judged_again_offline(
    tmp_path: Path, demo: Published, file: str
) -> None:
    run_restore(tmp_path, *words(demo, "--trust", file))
    shutil.rmtree(demo.store.root)
    wider = write_policy(
        tmp_path / "wider.json", policy(key("s", "statement"), key("i", "index"), key("s2", "statement"))
    )
    locked = ("--name", "demo", "--dest", demo.root, "--lock", demo.lock, "--strict")
    ran = run_restore(tmp_path, *locked, "--trust", wider, *STARTED)
    assert (ran.out, ran.line["outcome"], ran.line["trust"]) == ("started\n", "present", "signed")
    narrower = write_policy(tmp_path / "narrower.json", policy(key("s2", "statement")))
    assert run_restore(tmp_path, *locked, "--trust", narrower, *STARTED).out == ""
    revoked = write_policy(tmp_path / "revoked.json", policy(revoked=(demo.row.statement,)))
    assert run_restore(tmp_path, *locked, "--trust", revoked, *STARTED).out == ""


def test_the_line_says_how_far_this_start_trusts_what_an_earlier_one_restored(
    tmp_path: Path, demo: Published, file: str
) -> None:
    by_lock = words(demo, "--lock", demo.lock)
    for more, status in (
        (("--trust", file), "signed"),
        ((), trust.PINNED),  # nobody looked at a signature
        (("--trust", file), "signed"),
    ):
        ran = run_restore(tmp_path, *by_lock, *more, *STARTED)
        assert (ran.out, ran.line["trust"]) == ("started\n", status)
    assert ran.line["outcome"] == "present"


def test_a_harmed_envelope_vouches_for_nothing(tmp_path: Path, demo: Published, file: str) -> None:
    run_restore(tmp_path, *words(demo, "--trust", file))
    shutil.rmtree(demo.store.root)
    (envelope,) = Path(demo.root, ".cachepipe/envelopes").iterdir()
    facts = envelope.stat()
    envelope.write_bytes(envelope.read_bytes().replace(b"A", b"B", 1))
    os.utime(envelope, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # the stat says unchanged
    wider = write_policy(tmp_path / "wider.json", policy(key("s", "statement"), key("s2", "statement")))
    locked = ("--name", "demo", "--dest", demo.root, "--lock", demo.lock, "--strict")
    assert run_restore(tmp_path, *locked, "--trust", wider, *STARTED).out == ""


def test_a_present_start_imports_no_cryptography(tmp_path: Path, demo: Published, file: str) -> None:
    run_restore(tmp_path, *words(demo, "--trust", file, "--lock", demo.lock))
    code = (
        "import os, sys\n"
        "def told(*words): print(sorted({'cryptography', 'securesystemslib'} & set(sys.modules)), flush=True); os._exit(0)\n"
        "os.execvpe = told\nfrom cachepipe.entrypoint import main\nmain(sys.argv[1:])\n"
    )
    argv = [
        sys.executable,
        "-c",
        code,
        *restore_words(*words(demo, "--trust", file, "--lock", demo.lock))[3:],
        *STARTED,
    ]
    ran = subprocess.run(argv, env=environment(tmp_path), cwd="/", capture_output=True, text=True, check=True)
    assert "outcome=present" in ran.stderr
    assert ran.stdout == "[]\n"


# --- rollback on one node ------------------------------------------------------------------------------------------------


def test_a_node_that_has_seen_a_newer_version_refuses_an_older_one(tmp_path: Path, demo: Published, file: str) -> None:
    store = demo.store
    first = Path(store.root, index_key("demo", "stable", 1))
    assert first.exists()
    renew(store, "demo", "stable", _now())
    second = publish_release(tmp_path, number=1, trust=authority.choice(tmp_path / "keys"))
    ran = run_restore(tmp_path, *words(second, "--trust", file, "--state-dir", str(tmp_path / "state")))
    assert ran.line["outcome"] == "restored"
    for version in (2, 3):
        Path(store.root, index_key("demo", "stable", version)).unlink()
    Path(store.root, hint_key("demo", "stable")).write_text("1\n")
    ran = run_restore(tmp_path, *words(demo, "--trust", file, "--state-dir", str(tmp_path / "state"), "--strict"))
    assert ran.code == 14
    assert "this node has seen 3 or later" in ran.line["reason"]
    shutil.rmtree(tmp_path / "state")
    assert run_restore(tmp_path, *words(demo, "--trust", file, "--state-dir", str(tmp_path / "state"))).code == 0


def into(folder: Path, release: Published, *more: str) -> tuple[str, ...]:
    return (release.store.url, "--name", "demo", "--dest", str(folder), *more)


def roll_back(release: Published, newest: int) -> None:
    """Who writes the store puts version 1 back."""
    for version in range(2, newest + 1):
        Path(release.store.root, index_key("demo", "stable", version)).unlink()
    Path(release.store.root, hint_key("demo", "stable")).write_text("1\n")


def test_a_revocation_that_a_node_has_seen_is_not_forgotten_by_playing_the_store_back(
    tmp_path: Path, demo: Published, file: str
) -> None:
    seen = ("--trust", file, "--state-dir", str(tmp_path / "state"), "--strict")
    assert run_restore(tmp_path, *words(demo, *seen)).line["outcome"] == "restored"
    revoke(demo.store, "demo", "stable", demo.row.artifact, _now())
    assert run_restore(tmp_path, *words(demo, *seen)).code == 12
    roll_back(demo, 2)
    for folder in (Path(demo.root), tmp_path / "fresh"):
        ran = run_restore(tmp_path, *into(folder, demo, *seen))
        assert (ran.code, "this node has seen 2 or later" in ran.line["reason"]) == (14, True)


@pytest.mark.parametrize("state", ["default", "beside the folder", "told"])
@pytest.mark.parametrize("refusal", ["all rows revoked", "revoked by the policy", "another machine"])
def test_a_version_that_is_refused_is_remembered_wherever_the_state_lies(
    tmp_path: Path, demo: Published, file: str, state: str, refusal: str
) -> None:
    place = {"default": (), "beside the folder": ("--dest", demo.root), "told": ("--state-dir", f"{tmp_path}/a/b/s")}
    asked = (demo.store.url, "--name", "demo", "--strict", *place[state])
    judged = file
    if refusal == "all rows revoked":
        revoke(demo.store, "demo", "stable", demo.row.artifact, _now())
    elif refusal == "another machine":
        parts = tuple(replace(part, value="9.9") if part.name == "torch" else part for part in demo.row.fingerprint)
        newer = replace(read_channel(demo.store, "demo", "stable", _now()).index, version=2)
        newer = replace(newer, rows=(replace(demo.row, fingerprint=parts),))
        put_index(demo, newer)
    else:
        renew(demo.store, "demo", "stable", _now())
        judged = write_policy(tmp_path / "revoking.json", policy(revoked=(demo.row.statement,)))
    Path(demo.root).parent.mkdir(mode=0o700, exist_ok=True)  # where an earlier start has been
    codes = {"all rows revoked": 12, "another machine": 19, "revoked by the policy": 14}
    assert run_restore(tmp_path, *asked, "--trust", judged).code == codes[refusal]
    roll_back(demo, 2)
    for _ in range(2):
        ran = run_restore(tmp_path, *asked, "--trust", file)
        assert (ran.code, "this node has seen 2 or later" in ran.line["reason"]) == (14, True), ran.err
    assert not os.path.exists(demo.root)


def test_what_a_node_saw_of_one_store_bounds_no_other_store_with_another_root(
    tmp_path: Path, demo: Published, file: str
) -> None:
    (tmp_path / "other").mkdir()
    other = publish_release(tmp_path / "other", number=5, trust=authority.choice(tmp_path / "keys"))
    revoke(demo.store, "demo", "stable", demo.row.artifact, _now())
    asked = ("--name", "demo", "--trust", file, "--strict")
    assert run_restore(tmp_path, demo.store.url, *asked).code == 12
    assert run_restore(tmp_path, other.store.url, *asked).line["outcome"] == "restored"


def test_a_folder_of_others_is_no_place_for_floors(tmp_path: Path, demo: Published, file: str) -> None:
    """Who prepares scratch space can neither have us write behind a link nor keep us from the cache."""
    (tmp_path / "behind").mkdir()
    env = environment(tmp_path)
    scratch = Path(env["TMPDIR"], f"cachepipe-{os.geteuid()}")
    scratch.mkdir()
    scratch.chmod(0o777)
    (scratch / ".state").symlink_to(tmp_path / "behind")
    planted = tmp_path / "behind/floors" / hashlib.sha256(demo.store.url.encode()).hexdigest()[:16] / "demo@stable"
    planted.parent.mkdir(parents=True)
    planted.write_text("99\n")
    ran = run_restore(tmp_path, demo.store.url, "--name", "demo", "--trust", file, "--strict", env=env)
    assert ran.line["outcome"] == "restored"
    assert planted.read_text() == "99\n" and len(files_below(tmp_path / "behind")) == 1


def test_a_folder_that_lies_there_is_no_way_round_a_newer_version_that_was_seen(
    tmp_path: Path, demo: Published, file: str
) -> None:
    seen = ("--trust", file, "--state-dir", str(tmp_path / "state"), "--strict")
    assert run_restore(tmp_path, *into(tmp_path / "one", demo, *seen)).line["outcome"] == "restored"
    second = publish_release(tmp_path, number=1, trust=authority.choice(tmp_path / "keys"))
    assert run_restore(tmp_path, *into(tmp_path / "other", second, *seen)).line["outcome"] == "restored"
    roll_back(demo, 2)
    assert run_restore(tmp_path, *into(tmp_path / "one", demo, *seen)).code == 14


def test_a_renewed_version_of_what_lies_there_is_remembered(tmp_path: Path, demo: Published, file: str) -> None:
    seen = ("--trust", file, "--state-dir", str(tmp_path / "state"), "--strict")
    assert run_restore(tmp_path, *words(demo, *seen)).line["outcome"] == "restored"
    renew(demo.store, "demo", "stable", _now())
    assert run_restore(tmp_path, *words(demo, *seen)).line["outcome"] == "present"
    roll_back(demo, 2)
    assert run_restore(tmp_path, *into(tmp_path / "fresh", demo, *seen)).code == 14


def test_a_start_that_finds_its_folder_tells_the_service_the_dates_of_the_index_that_it_read(
    tmp_path: Path, demo: Published, file: str
) -> None:
    assert run_restore(tmp_path, *words(demo, "--trust", file)).line["outcome"] == "restored"
    renew(demo.store, "demo", "stable", _now() + timedelta(seconds=60))
    newest = read_channel(demo.store, "demo", "stable", _now() + timedelta(seconds=60)).index
    for _ in ("all requests", "by the renewed marker"):
        ran = run_restore(tmp_path, *words(demo, "--trust", file), *command())
        assert ran.line["outcome"] == "present"
        assert service_environment(ran)["CACHEPIPE_INDEX_DATES"] == f"{newest.created_at}/{newest.expires_at}"


def test_a_version_that_is_refused_beside_the_folder_does_not_get_into_its_marker(
    tmp_path: Path, demo: Published, file: str
) -> None:
    asked = (demo.store.url, "--name", "demo", "--trust", file, "--strict")
    assert run_restore(tmp_path, *asked).line["outcome"] == "restored"
    marker = Path(demo.root, ".cachepipe/marker.json")
    before = marker.read_bytes()
    renew(demo.store, "demo", "stable", _now())
    (floor := Path(demo.root).parent / ".state/floors/demo@stable").write_text("3\n")
    ran = run_restore(tmp_path, *asked)
    assert (ran.code, "this node has seen 3 or later" in ran.line["reason"]) == (14, True)
    assert marker.read_bytes() == before
    assert ran.line["hint"].endswith(f"if it was made anew, or another store is meant now, remove {floor}")
    floor.unlink()
    assert run_restore(tmp_path, *asked).line["outcome"] == "present"
    assert read_marker(marker.read_bytes()).index_version == 2


def test_what_another_store_named_is_not_current_for_this_one(tmp_path: Path, demo: Published, file: str) -> None:
    other = publish_release(tmp_path / "other", number=5, trust=authority.choice(tmp_path / "keys"))
    asked = ("--trust", file, "--strict")
    first = run_restore(tmp_path, *into(tmp_path / "dest", demo, *asked))
    second = run_restore(tmp_path, *into(tmp_path / "dest", other, *asked))
    assert (first.line["outcome"], second.line["outcome"]) == ("restored", "restored")
    assert first.line["digest"] == demo.row.statement != second.line["digest"] == other.row.statement
    assert run_restore(tmp_path, *into(tmp_path / "dest", other, *asked)).line["outcome"] == "present"


def test_a_key_may_last_to_the_end_of_time(tmp_path: Path, demo: Published, file: str) -> None:
    tree = json.loads(Path(file).read_text())
    for row in tree["keys"]:
        row["not_after"] = "9999-12-31T23:59:59Z"
    Path(file).write_text(json.dumps(tree))
    for outcome in ("restored", "present"):
        assert run_restore(tmp_path, *words(demo, "--trust", file, "--strict")).line["outcome"] == outcome


def _now() -> datetime:
    return datetime.now(timezone.utc)


# --- other commands ------------------------------------------------------------------------------------------------------


def cachepipe(base: Path, *line: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "cachepipe", *line]
    return subprocess.run(argv, env=environment(base, **env), cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.parametrize("verb", [("ls",), ("show", "demo@stable"), ("diff", "demo@stable", "demo@stable:1")])
def test_looking_into_a_store_wants_signatures_too(
    tmp_path: Path, demo: Published, file: str, verb: tuple[str, ...]
) -> None:
    line = (verb[0], demo.store.url, *verb[1:])
    told = cachepipe(tmp_path, *line, "--trust", file)
    assert told.returncode == 0, told.stderr
    assert cachepipe(tmp_path, *line).returncode == 14
    loose = cachepipe(tmp_path, *line, "--insecure-unsigned")
    assert loose.returncode == 0
    assert "warning: --insecure-unsigned" in loose.stderr
    assert cachepipe(tmp_path, *line, "--insecure-unsigned", "--trust", file).returncode == 14


def test_show_and_ls_say_how_far_to_trust(tmp_path: Path, demo: Published, file: str) -> None:
    shown = json.loads(cachepipe(tmp_path, "show", demo.store.url, "demo@stable", "--trust", file, "--json").stdout)
    assert shown["artifacts"][0]["status"] == "signed"
    listed = json.loads(cachepipe(tmp_path, "ls", demo.store.url, "--trust", file, "--json").stdout)
    assert listed["channels"][0]["status"] == "signed"


def test_promote_signs_with_the_index_key_and_refuses_without_one(tmp_path: Path, demo: Published, file: str) -> None:
    line = ("promote", demo.store.url, "--name", "demo", "--from", "stable", "--to", "canary", "--trust", file)
    statement_alone = ("--index-key", authority.write_key(tmp_path / "keys", "s"))
    refused = cachepipe(tmp_path, *line, *statement_alone)
    assert (refused.returncode, "may not sign as index" in refused.stderr) == (14, True)
    good = cachepipe(tmp_path, *line, CACHEPIPE_INDEX_KEY=authority.write_key(tmp_path / "keys", "i"))
    assert good.returncode == 0, good.stderr
    ran = run_restore(tmp_path, *words(demo, "--channel", "canary", "--trust", file), *STARTED)
    assert ran.line["trust"] == "signed"


def test_a_development_key_is_said_in_one_line_on_stderr(tmp_path: Path) -> None:
    release = publish_release(tmp_path)
    done = cachepipe(tmp_path, "promote", release.store.url, "--name", "demo", "--from", "stable", "--to", "canary")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("development key") == 1
    assert f"{release.store.root}/.keys/dev.key" in done.stderr
    assert run_restore(tmp_path, *words(release), *STARTED).line["trust"] == "development key"


def test_lock_wants_signatures_before_it_pins(tmp_path: Path, demo: Published, file: str) -> None:
    line = ("lock", demo.store.url, "--name", "demo", "--output", str(tmp_path / "new.lock"))
    assert cachepipe(tmp_path, *line).returncode == 14
    assert not (tmp_path / "new.lock").exists()
    assert cachepipe(tmp_path, *line, "--trust", file).returncode == 0
    ran = run_restore(tmp_path, *words(demo, "--lock", str(tmp_path / "new.lock"), "--trust", file), *STARTED)
    assert ran.line["trust"] == "signed"


def test_with_the_statement_key_alone_an_artifact_is_published_and_in_no_channel(tmp_path: Path) -> None:
    keys = replace(authority.choice(tmp_path / "keys"), index_key="")
    release = publish_release(tmp_path, trust=keys)
    assert release.store.get(statement_key(release.row.artifact), 1 << 20) is not None
    assert list(release.store.list("v1/index/")) == []
    publisher = LocalStore(release.store.root, authority.choice(tmp_path / "keys"))
    promote(publisher, "demo", "candidate", "candidate", release.row.artifact, _now())
    file = str(tmp_path / "keys/trust.json")
    assert run_restore(tmp_path, *words(release, "--channel", "candidate", "--trust", file)).line["trust"] == "signed"


def put_index(release: Published, index: Index) -> None:
    sealed = release.store.trust.seal(index_bytes(index), PAYLOAD_TYPE)
    release.store.put_if_absent(index_key(index.name, "stable", index.version), sealed)
    Path(release.store.root, hint_key(index.name, "stable")).write_text(f"{index.version}\n")


def age(release: Published, version: int = 2, name: str = "demo") -> None:
    """Publishes a version of the channel that is 8 of its 14 days old."""
    old = replace(read_channel(release.store, name, "stable", _now()).index, version=version)
    aged = replace(
        old, created_at=timestamp(_now() - timedelta(days=8)), expires_at=timestamp(_now() + timedelta(days=6))
    )  # fmt: skip
    put_index(release, aged)


OLD = "more than half of its life is over"


def test_half_of_its_life_is_said_by_every_start_in_the_same_words(tmp_path: Path, demo: Published, file: str) -> None:
    age(demo)
    lines = [run_restore(tmp_path, *words(demo, "--trust", file), *STARTED).line for _ in range(3)]
    assert [line["outcome"] for line in lines] == ["restored", "present", "present"]
    assert OLD in lines[0]["reason"] and {line["reason"] for line in lines} == {lines[0]["reason"]}
    pinned = run_restore(tmp_path, *words(demo, "--trust", file, "--lock", demo.lock), *STARTED)
    assert (pinned.line["outcome"], "reason" in pinned.line) == ("present", False), "a lock file has no age"
    renew(demo.store, "demo", "stable", _now())
    renewed = [run_restore(tmp_path, *words(demo, "--trust", file), *STARTED).line for _ in range(2)]
    assert [("reason" in line, line["outcome"]) for line in renewed] == [(False, "present")] * 2


def test_half_of_the_life_that_the_policy_allows_is_said_by_a_present_start(tmp_path: Path, demo: Published) -> None:
    created = read_channel(demo.store, "demo", "stable", _now()).index.created_at
    short = write_policy(tmp_path / "short.json", policy(channels={"stable": ChannelRule(1, maximum_age_s=600)}))
    asked = words(demo, "--trust", short)
    assert "reason" not in run_restore(tmp_path, *asked, *STARTED).line
    demo_marker = Path(demo.root, ".cachepipe/marker.json")
    marker = read_marker(demo_marker.read_bytes())
    ends = datetime.fromisoformat(created.removesuffix("Z")).replace(tzinfo=timezone.utc) + timedelta(seconds=600)
    assert (marker.index_created_at, marker.index_ends_at) == (created, timestamp(ends))
    assert OLD in marker.age_warning(_now() + timedelta(seconds=301))


def test_each_channel_of_a_set_that_lies_there_says_its_age(tmp_path: Path, demo: Published, file: str) -> None:
    other = publish_release(tmp_path, "other", number=3, trust=authority.choice(tmp_path / "keys"))
    age(other, name="other")
    asked = (demo.store.url, "--name", "demo", "--name", "other", "--trust", file, "--dest", str(tmp_path / "both"))
    lines = [run_restore(tmp_path, *asked, *STARTED).line for _ in range(2)]
    assert [line["outcome"] for line in lines] == ["restored", "present"]
    assert all("other@stable:2" in line["reason"] and OLD in line["reason"] for line in lines)


@pytest.mark.parametrize("harm", ["absent", "no time"])
def test_a_marker_without_its_dates_is_used_and_warns_of_nothing_that_it_does_not_know(
    tmp_path: Path, demo: Published, file: str, harm: str
) -> None:
    age(demo)
    run_restore(tmp_path, *words(demo, "--trust", file))
    path = Path(demo.root, ".cachepipe/marker.json")
    tree = json.loads(path.read_text())
    del tree["seal"]  # the markers of then had none
    for name in ("index_created_at", "index_ends_at"):
        assert tree.pop(name)
        if harm == "no time":
            tree[name] = "soon"
    path.write_bytes(canonical_bytes(tree))
    ran = run_restore(tmp_path, *words(demo, "--trust", file), *STARTED)
    assert (ran.out, ran.line["outcome"]) == ("started\n", "present")
    # what is no time is judged by the store, which has it again
    assert (OLD in ran.line.get("reason", "")) == (harm == "no time")
