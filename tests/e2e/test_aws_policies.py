"""T-IAM: the policies of ci/aws allow what each role's commands ask of S3, seen on the wire, and nothing that they do not ask."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import click
import pytest
import yaml

from cachepipe.adapters.local_store import LocalStore
from cachepipe.cli.main import cli, main
from cachepipe.cli.options import time_of
from cachepipe.domain.collect import Floors
from cachepipe.domain.index import LIFETIME, IndexRow
from cachepipe.domain.kms_log import Window
from cachepipe.domain.layout import pin_key
from cachepipe.workflows import audit, collect
from cachepipe.workflows import publish as publishing
from cachepipe.workflows.fetch import newest, read_index_version
from cachepipe.workflows.fsck import fsck
from cachepipe.workflows.publish import PackedArtifact
from tests.support import s3, seaweed
from tests.support.artifacts import NOW
from tests.support.fault_proxy import FaultProxy, Request
from tests.support.iam import Ask, applies, is_allowed, listed
from tests.support.release import REPOSITORY
from tests.support.restoring import environment, publish_release, run_restore

FOLDER = REPOSITORY / "ci" / "aws"
ROLES = ("runtime", "builder", "publisher", "auditor", "janitor")
READERS = ("runtime", "auditor")
JANITOR = "arn:aws:iam::123456789012:role/cachepipe-janitor"
VALUES = {
    "BUCKET_KEY": "arn:aws:kms:eu-west-1:123456789012:key/b",
    "BUCKET": seaweed.S3_BUCKET,
    "PREFIX": "prod",
    "REGION": "eu-west-1",
    "STATEMENT_KEY": "arn:aws:kms:eu-west-1:123456789012:key/s",
    "INDEX_KEY": "arn:aws:kms:eu-west-1:123456789012:key/i",
    "JANITOR_ROLE": JANITOR,
    "TRAIL": "trail-of-the-account",
}


def policy(name: str) -> dict[str, Any]:
    """Returns a policy file with its placeholders filled in, as the README says to."""
    text = (FOLDER / f"{name}.json").read_text()
    for placeholder, value in VALUES.items():
        text = text.replace(placeholder, value)
    assert not re.search(r"\b[A-Z]{4,}(_[A-Z]+)*\b", text), "every placeholder has a value"
    found: dict[str, Any] = json.loads(text)
    assert found["Version"] == "2012-10-17"
    return found


def ask_of(request: Request, prefix: str, principal: str) -> Ask:
    """Returns a logged request as AWS would judge it, with the store's own prefix called `prod`."""
    target = urlsplit(request.target)
    query = parse_qs(target.query, keep_blank_values=True)
    s3_bucket, _, key = unquote(target.path).removeprefix("/").partition("/")
    context = {"aws:SecureTransport": "true", "aws:PrincipalArn": principal}
    if not key:
        assert request.method == "GET" and "list-type" in query, request
        listed_prefix = query["prefix"][0].replace(prefix, "prod", 1)
        return Ask("s3:ListBucket", f"arn:aws:s3:::{s3_bucket}", {**context, "s3:prefix": listed_prefix})
    actions = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject", "DELETE": "s3:DeleteObject"}
    if request.method == "PUT":
        context["s3:ObjectCreationOperation"] = "true"
        if request.condition:
            context["s3:if-none-match"] = request.condition
    assert set(query) <= {"x-id"}, request.target
    return Ask(actions[request.method], f"arn:aws:s3:::{s3_bucket}/{key.replace(prefix, 'prod', 1)}", context)


@pytest.fixture(scope="module")
def asked(s3_server: seaweed.Seaweed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, list[Ask]]]:
    """Role → everything that its commands ask of S3, from an empty store on."""
    folder = tmp_path_factory.mktemp("roles")
    with pytest.MonkeyPatch.context() as patch, FaultProxy(s3_server.ports[0]) as proxy:
        for name, value in s3.environment().items():
            patch.setenv(name, value)
        url = s3.address(proxy.url)
        prefix = urlsplit(url).path.removeprefix("/")
        found = {}
        acts = {"builder": build, "publisher": move, "runtime": restore, "auditor": look, "janitor": clean}
        for role, act in acts.items():
            proxy.clear()
            act(url, folder)
            principal = JANITOR if role == "janitor" else f"arn:aws:iam::123456789012:role/cachepipe-{role}"
            found[role] = [ask_of(request, prefix, principal) for request in proxy.requests()]
        yield found


def build(url: str, folder: Path) -> None:
    """As `build` with the statement key alone: artifacts, and no index version; what is there already is found again."""
    store = s3.opened(url)
    (folder / "built").mkdir()
    statements = [publish_release(folder / "built", number=number).statement for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "commit_rows", lambda *_: None)
        publishing.rehearse(store, "demo", "candidate", NOW)
        for number, statement in enumerate(statements):
            (work,) = (folder / "built").glob(f"work-demo-{number}-*")
            for _ in range(2):
                publishing.publish(store, "demo", "candidate", PackedArtifact(statement, work / "blobs"), NOW)
    assert newest(store, "demo", "candidate") is None  # `build` looks whether a channel has something to carry over


def move(url: str, folder: Path) -> None:
    artifacts = [row.artifact for row in built(folder)]
    for words in (
        *(["promote", url, "--name", "demo", "--to", "candidate", artifact] for artifact in artifacts[:2]),
        ["promote", url, "--name", "demo"],
        ["rollback", url, "--name", "demo", "--channel", "candidate"],
        ["renew", url, "--name", "demo"],
        ["lock", url, "--name", "demo", "--output", str(folder / "lock")],
        ["ls", url],
        ["show", url, "demo@stable"],
        ["show", url, artifacts[0]],
        ["revoke", url, "--name", "demo", "--channel", "candidate", "demo@candidate"],
    ):
        assert main(words) == 0, words
    s3.opened(url).put_if_absent(pin_key(artifacts[0], "ab" * 16), b"of a publisher that was killed")


def built(folder: Path) -> list[IndexRow]:
    """Returns the rows of the artifacts, in the order in which they were built."""
    store = LocalStore(folder / "built" / "store")
    return [read_index_version(store, "demo", "stable", version, None).index.rows[0] for version in (1, 2, 3)]


def restore(url: str, folder: Path) -> None:
    env = environment(folder, **s3.environment())
    for number, words in enumerate(([], ["--lock", str(folder / "lock")])):
        dest = ("--dest", str(folder / f"dest-{number}"))
        ran = run_restore(folder, url, "--name", "demo", *dest, *words, "--", "true", env=env)
        assert ran.line["outcome"] == "restored", ran.err
    ran = run_restore(folder, url, "--name", "nothing", "--", "true", env=env)
    assert "nothing is published" in ran.line["reason"], ran.err


def look(url: str, folder: Path) -> None:
    """As `fsck --deep --kms-log`; KMS, which it asks for public keys, is no part of S3."""
    store = s3.opened(url)
    (folder / "log.json").write_text('{"Records": []}')
    window = Window(NOW - timedelta(days=1), NOW)
    found = audit.audit(store, audit.AuditRequest([folder / "log.json"], [], window), NOW)
    assert fsck(store, NOW, is_deep=True, audit=found).problems == ()


def clean(url: str, folder: Path) -> None:
    """A collection of everything that no channel names, stale pins too, and a check of all the rest."""
    # without checksums objects are removed one by one, which the log shows; S3 judges a bulk removal key by key as well
    store = s3.opened(f"{url}&checksums=off")
    done = collect.gc(store, floors=Floors(unfinished_s=0, published_s=0, versions=0, pin_s=0), deletes=True)
    assert done.removed and len(done.announcements) == 1
    assert fsck(store, NOW, is_deep=True).problems == ()


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_everything_that_its_commands_do(asked: Mapping[str, list[Ask]], role: str) -> None:
    assert len(asked[role]) > 5
    refused = [ask for ask in asked[role] if not is_allowed(ask, policy(role), policy("bucket"))]
    assert refused == []


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_nothing_that_its_commands_do_not(asked: Mapping[str, list[Ask]], role: str) -> None:
    for statement in policy(role)["Statement"]:
        if "kms:" in str(statement["Action"]) or VALUES["TRAIL"] in str(statement["Resource"]):
            continue  # asked of KMS; and CloudTrail's logs, which `aws s3 sync` fetches
        for action in listed(statement["Action"]):
            for resource in listed(statement["Resource"]):
                narrow = {**statement, "Action": action, "Resource": resource}
                assert any(applies(narrow, ask) for ask in asked[role]), f"{role} never needs {action} on {resource}"


def test_no_role_can_do_the_work_of_another_but_read(asked: Mapping[str, list[Ask]]) -> None:
    for role in ROLES:
        for other in ROLES:
            refused = [ask for ask in asked[other] if not is_allowed(ask, policy(role), policy("bucket"))]
            is_reader = other == "runtime" or (role, other) == ("janitor", "auditor")
            assert (refused == []) == (other == role or is_reader), f"{role} for {other}"


def may(role: str, action: str, key: str = "", **context: str) -> bool:
    principal = JANITOR if role == "janitor" else "arn:aws:iam::123456789012:role/other"
    facts = {"aws:SecureTransport": "true", "aws:PrincipalArn": principal, "s3:ObjectCreationOperation": "true"}
    facts |= {name.replace("__", ":").replace("_", "-"): value for name, value in context.items()}
    resource = f"arn:aws:s3:::{seaweed.S3_BUCKET}{'/' if key else ''}{key}"
    return is_allowed(Ask(action, resource, facts), policy(role), policy("bucket"))


ARTIFACT = "prod/v1/artifacts/01KB9WZDG0000000000000000A"
INDEX = "prod/v1/index/demo/stable/0000000001.dsse.json"
HINT = "prod/v1/index/demo/stable/hint"


@pytest.mark.parametrize("role", READERS)
def test_the_runtime_and_the_auditor_neither_write_nor_delete_and_the_runtime_does_not_list(role: str) -> None:
    assert may(role, "s3:GetObject", INDEX)
    for action in ("s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion", "s3:PutObjectAcl"):
        for key in (INDEX, HINT, f"{ARTIFACT}/statement.dsse.json", "prod/v1/pins/x/y", "other/file"):
            assert not may(role, action, key, s3__if_none_match="*")
    assert may(role, "s3:ListBucket", s3__prefix="prod/v1/") == (role == "auditor")
    assert not may(role, "s3:GetObject", "other/file")
    assert not may(role, "s3:GetObject", "prod/v1/pins/x/y")


def test_the_auditor_knows_both_keys_and_reads_the_trails_logs_alone() -> None:
    trail = f"arn:aws:s3:::{VALUES['TRAIL']}"
    for key in ("STATEMENT_KEY", "INDEX_KEY"):
        assert is_allowed(Ask("kms:GetPublicKey", VALUES[key], {}), policy("auditor"))
        assert not is_allowed(Ask("kms:Sign", VALUES[key], {}), policy("auditor"))
    for action, resource, is_its in (
        ("s3:ListBucket", trail, True),
        ("s3:GetObject", f"{trail}/AWSLogs/1/CloudTrail/eu-west-1/2026/11/30/x.json.gz", True),
        ("s3:GetObject", f"{trail}/other", False),
        ("s3:PutObject", f"{trail}/AWSLogs/x", False),
        ("s3:DeleteObject", f"{trail}/AWSLogs/x", False),
    ):
        assert is_allowed(Ask(action, resource, {}), policy("auditor")) == is_its


@pytest.mark.parametrize("key", [f"{ARTIFACT}/packs/aa", f"{ARTIFACT}/statement.dsse.json", "prod/v1/pins/x/y"])
def test_a_builder_creates_only_what_is_not_there(key: str) -> None:
    assert may("builder", "s3:PutObject", key, s3__if_none_match="*")
    assert not may("builder", "s3:PutObject", key)


def test_a_publisher_overwrites_the_hint_alone() -> None:
    assert may("publisher", "s3:PutObject", HINT)
    assert may("publisher", "s3:PutObject", INDEX, s3__if_none_match="*")
    assert not may("publisher", "s3:PutObject", INDEX)
    assert not may("publisher", "s3:PutObject", f"{ARTIFACT}/statement.dsse.json", s3__if_none_match="*")
    assert not may("builder", "s3:PutObject", INDEX, s3__if_none_match="*")
    assert not may("builder", "s3:PutObject", HINT)


@pytest.mark.parametrize("role", ROLES)
def test_nobody_removes_history_and_the_janitor_alone_removes_artifacts(role: str) -> None:
    for action in ("s3:DeleteObject", "s3:DeleteObjectVersion"):
        for key in (INDEX, HINT, "prod/v1/format.json"):
            assert not may(role, action, key)
    assert may(role, "s3:DeleteObject", f"{ARTIFACT}/packs/aa") == (role == "janitor")
    assert may(role, "s3:DeleteObject", "prod/v1/pins/x/y") == (role not in READERS)


def test_the_bucket_refuses_even_whom_a_policy_allows_everything() -> None:
    everything = {"Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}

    def allowed(action: str, key: str, **context: str) -> bool:
        facts = {
            "aws:SecureTransport": "true",
            "s3:ObjectCreationOperation": "true",
            "aws:PrincipalArn": "x",
            **context,
        }
        ask = Ask(action, f"arn:aws:s3:::{seaweed.S3_BUCKET}/{key}", facts)
        return is_allowed(ask, everything, policy("bucket"))

    assert allowed("s3:GetObject", INDEX)
    assert not allowed("s3:GetObject", INDEX, **{"aws:SecureTransport": "false"})
    assert not allowed("s3:PutObject", INDEX)
    assert not allowed("s3:DeleteObject", f"{ARTIFACT}/packs/aa")
    assert allowed("s3:PutObject", INDEX, **{"s3:if-none-match": "*"})
    assert allowed("s3:PutObject", INDEX, **{"s3:ObjectCreationOperation": "false"}), "a part of a multipart upload"
    assert allowed("s3:PutObject", "other/file"), "what is not ours stays as it was"


def test_keys_sign_for_the_role_that_owns_them_and_nobody_else() -> None:
    signs = {
        role: {
            resource
            for statement in policy(role)["Statement"]
            if "kms:Sign" in listed(statement["Action"])
            for resource in listed(statement["Resource"])
        }
        for role in ROLES
    }
    assert signs == {
        "runtime": set(),
        "builder": {VALUES["STATEMENT_KEY"]},
        "publisher": {VALUES["INDEX_KEY"]},
        "auditor": set(),
        "janitor": set(),
    }
    for role in ROLES:
        (through_s3,) = [row for row in policy(role)["Statement"] if row["Resource"] == VALUES["BUCKET_KEY"]]
        assert through_s3["Condition"] == {"StringEquals": {"kms:ViaService": "s3.eu-west-1.amazonaws.com"}}
        assert ("kms:GenerateDataKey" in through_s3["Action"]) == (role not in READERS)


# --- the weekly renewal and the nightly audit -----------------------------------------------------------------------------


def workflow(name: str) -> tuple[list[str], dict[str, Any]]:
    """Returns the fields of the schedule of a workflow of ci/aws, and its one job."""
    document = yaml.safe_load((FOLDER / name).read_text())
    (schedule,) = document[True]["schedule"]  # YAML 1.1 reads `on` as true
    assert document["permissions"] == {"id-token": "write"}
    (job,) = document["jobs"].values()
    assert job["env"]["CACHEPIPE_STORE"] == "s3://BUCKET/PREFIX"
    return schedule["cron"].split(), job


def parsed(job: dict[str, Any]) -> list[click.Context]:
    """Returns what click reads of every command of ours in a job."""
    lines = [shlex.split(line) for step in job["steps"] for line in step.get("run", "").splitlines()]
    context = click.Context(cli, info_name="cachepipe")
    found = []
    for _, verb, *rest in [words for words in lines if words[0] == "cachepipe"]:
        command = cli.get_command(context, verb)
        assert command is not None
        found.append(command.make_context(verb, [word.replace("NAME", "demo") for word in rest], parent=context))
    return found


def test_the_renewal_runs_twice_within_a_channels_life_and_its_commands_parse() -> None:
    (minute, hour, day, month, weekday), job = workflow("renew.yaml")
    assert (day, month) == ("*", "*") and weekday in "0123456" and int(minute) < 60 and int(hour) < 24
    assert 2 * timedelta(days=7) <= LIFETIME
    commands = parsed(job)
    assert [command.info_name for command in commands] == ["renew", "ls"]
    assert {command.params["name"] for command in commands} == {"demo"}


def test_the_audit_runs_every_night_and_its_log_and_its_window_leave_no_gap() -> None:
    (minute, hour, *every), job = workflow("audit.yaml")
    assert every == ["*", "*", "*"] and int(minute) < 60 and int(hour) < 24
    (command,) = parsed(job)
    asked = command.params
    assert (command.info_name, asked["keys"]) == ("fsck", ("kms:alias/cachepipe-build", "kms:alias/cachepipe-index"))
    window = NOW - time_of(asked["since"], NOW)
    assert window >= timedelta(days=1) + 2 * (NOW - time_of(asked["until"], NOW)), "a night that begins late"
    (fetch,) = [line for step in job["steps"] for line in step.get("run", "").splitlines() if "s3 sync" in line]
    days = re.fullmatch(
        r"for day in ([0-9 ]+); do aws s3 sync .*\$\(date -u -d \"-\$day days\" \+%Y/%m/%d\) logs/\$day; done", fetch
    )
    assert days is not None and days[1].split() == [str(day) for day in range(window.days + 2)]
    assert asked["logs"] == (Path("logs"),)


@pytest.mark.parametrize("name", ["renew.yaml", "audit.yaml"])
def test_a_workflow_installs_what_its_commands_import(name: str) -> None:
    _, job = workflow(name)
    (install,) = [step["run"] for step in job["steps"] if "pip install" in step.get("run", "")]
    named = set(install.split())
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed_there = text.split("\ndependencies = [")[1].split("\n]")[0]
    needed = set(re.findall(r'^ +"([A-Za-z0-9-]+)', listed_there, re.MULTILINE))
    assert len(needed) > 5
    assert needed - named == {"torch", "nvidia-ml-py", "Jinja2"}, "which neither imports"
