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
from cachepipe.domain.collect import Floors
from cachepipe.domain.index import LIFETIME, IndexRow
from cachepipe.domain.layout import pin_key
from cachepipe.workflows import collect
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
ROLES = ("runtime", "builder", "publisher", "janitor")
JANITOR = "arn:aws:iam::123456789012:role/cachepipe-janitor"
VALUES = {
    "BUCKET_KEY": "arn:aws:kms:eu-west-1:123456789012:key/b",
    "BUCKET": seaweed.S3_BUCKET,
    "PREFIX": "prod",
    "REGION": "eu-west-1",
    "STATEMENT_KEY": "arn:aws:kms:eu-west-1:123456789012:key/s",
    "INDEX_KEY": "arn:aws:kms:eu-west-1:123456789012:key/i",
    "JANITOR_ROLE": JANITOR,
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
        for role, act in {"builder": build, "publisher": move, "runtime": restore, "janitor": clean}.items():
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
        if statement["Action"][0].startswith("k") or "kms:" in str(statement["Action"]):
            continue
        for action in listed(statement["Action"]):
            for resource in listed(statement["Resource"]):
                narrow = {**statement, "Action": action, "Resource": resource}
                assert any(applies(narrow, ask) for ask in asked[role]), f"{role} never needs {action} on {resource}"


def test_no_role_can_do_the_work_of_another_but_read(asked: Mapping[str, list[Ask]]) -> None:
    for role in ROLES:
        for other in ROLES:
            refused = [ask for ask in asked[other] if not is_allowed(ask, policy(role), policy("bucket"))]
            assert (refused == []) == (other in (role, "runtime")), f"{role} for {other}"


def may(role: str, action: str, key: str = "", **context: str) -> bool:
    principal = JANITOR if role == "janitor" else "arn:aws:iam::123456789012:role/other"
    facts = {"aws:SecureTransport": "true", "aws:PrincipalArn": principal, "s3:ObjectCreationOperation": "true"}
    facts |= {name.replace("__", ":").replace("_", "-"): value for name, value in context.items()}
    resource = f"arn:aws:s3:::{seaweed.S3_BUCKET}{'/' if key else ''}{key}"
    return is_allowed(Ask(action, resource, facts), policy(role), policy("bucket"))


ARTIFACT = "prod/v1/artifacts/01KB9WZDG0000000000000000A"
INDEX = "prod/v1/index/demo/stable/0000000001.dsse.json"
HINT = "prod/v1/index/demo/stable/hint"


def test_the_runtime_neither_lists_nor_writes_nor_deletes() -> None:
    assert may("runtime", "s3:GetObject", INDEX)
    for action in ("s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion", "s3:PutObjectAcl"):
        for key in (INDEX, HINT, f"{ARTIFACT}/statement.dsse.json", "prod/v1/pins/x/y", "other/file"):
            assert not may("runtime", action, key, s3__if_none_match="*")
    assert not may("runtime", "s3:ListBucket", s3__prefix="prod/v1/")
    assert not may("runtime", "s3:GetObject", "other/file")
    assert not may("runtime", "s3:GetObject", "prod/v1/pins/x/y")


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
    assert may(role, "s3:DeleteObject", "prod/v1/pins/x/y") == (role != "runtime")


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
        "janitor": set(),
    }
    for role in ROLES:
        (through_s3,) = [row for row in policy(role)["Statement"] if row["Resource"] == VALUES["BUCKET_KEY"]]
        assert through_s3["Condition"] == {"StringEquals": {"kms:ViaService": "s3.eu-west-1.amazonaws.com"}}
        assert ("kms:GenerateDataKey" in through_s3["Action"]) == (role != "runtime")


# --- the weekly renewal ---------------------------------------------------------------------------------------------------


def test_the_renewal_runs_twice_within_a_channels_life_and_its_commands_parse() -> None:
    document = yaml.safe_load((FOLDER / "renew.yaml").read_text())
    (schedule,) = document[True]["schedule"]  # YAML 1.1 reads `on` as true
    minute, hour, day, month, weekday = schedule["cron"].split()
    assert (day, month) == ("*", "*") and weekday in "0123456" and int(minute) < 60 and int(hour) < 24
    assert 2 * timedelta(days=7) <= LIFETIME
    assert document["permissions"] == {"id-token": "write"}
    (job,) = document["jobs"].values()
    assert job["env"]["CACHEPIPE_STORE"] == "s3://BUCKET/PREFIX"
    lines = [shlex.split(line) for step in job["steps"] for line in step.get("run", "").splitlines()]
    ours = [words[1:] for words in lines if words[0] == "cachepipe"]
    assert [words[0] for words in ours] == ["renew", "ls"]
    context = click.Context(cli, info_name="cachepipe")
    for verb, *rest in ours:
        command = cli.get_command(context, verb)
        assert command is not None
        parsed = command.make_context(verb, [word.replace("NAME", "demo") for word in rest], parent=context)
        assert parsed.params["name"] == "demo"


def test_the_renewal_installs_what_its_commands_import() -> None:
    document = yaml.safe_load((FOLDER / "renew.yaml").read_text())
    (job,) = document["jobs"].values()
    (install,) = [step["run"] for step in job["steps"] if "pip install" in step.get("run", "")]
    named = set(install.split())
    text = (REPOSITORY / "pyproject.toml").read_text()
    listed_there = text.split("\ndependencies = [")[1].split("\n]")[0]
    needed = set(re.findall(r'^ +"([A-Za-z0-9-]+)', listed_there, re.MULTILINE))
    assert len(needed) > 5
    assert needed - named == {"torch", "nvidia-ml-py", "Jinja2"}, "which no renewal imports"
