"""A store on a real S3 server, by the real command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.support import motoserver, s3, seaweed
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.recorder import SilentServer
from tests.support.release import run_cachepipe
from tests.support.restoring import Published, Ran, command, environment, files_below, publish_release, run_restore

ENVIRONMENT = s3.environment()
READER = s3.environment(seaweed.READER)


@pytest.fixture
def proxy(s3_server: seaweed.Seaweed) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.ports[0]) as started:
        yield started


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may write the store."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def demo(tmp_path: Path) -> Published:
    return publish_release(tmp_path)


@pytest.fixture
def url(proxy: FaultProxy, demo: Published, opened: None) -> str:
    """The address of a store that holds the release, behind the proxy."""
    address = s3.address(proxy.url)
    s3.copy_store(demo.store, s3.opened(address))
    proxy.clear()
    return address


@pytest.fixture(params=["obstore", "boto3"])
def reads(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """What makes a restore read with one of the clients: a profile is known to boto3 alone."""
    if request.param == "obstore":
        return {}
    (tmp_path / "config").write_text("[default]\nregion = us-east-1\n")
    return {"AWS_CONFIG_FILE": str(tmp_path / "config")}


def restore(base: Path, url: str, *more: str, env: dict[str, str] | None = None) -> Ran:
    return run_restore(base, url, "--name", "demo", *more, env=environment(base, **(env or ENVIRONMENT)))


def asked(proxy: FaultProxy) -> list[str]:
    """Returns what was asked for: the method, and the key without the store's prefix."""
    return [f"{row.method} {row.target.partition('?')[0].split('/v1/')[-1]}" for row in proxy.requests()]


def kinds(proxy: FaultProxy) -> list[str]:
    """Returns the requests with digests and numbers left out."""
    found = []
    for line in asked(proxy):
        parts = line.split("/")
        found.append(
            "/".join(part for part in parts if len(part) < 20 or part.endswith(".json")).replace("artifacts/", "")
        )
    return found


# --- requests ----------------------------------------------------------------------------------------------------------


def test_case_k7_a_restore_from_a_channel_asks_for_six_objects_and_never_lists(
    tmp_path: Path, proxy: FaultProxy, url: str, demo: Published, reads: dict[str, str]
) -> None:
    ran = restore(tmp_path, url, *command(["true"]), env={**ENVIRONMENT, **reads})
    assert ran.line["outcome"] == "restored", ran.err
    assert files_below(demo.root) == demo.restored_bytes(demo.root)
    assert sorted(kinds(proxy)) == sorted([
        "GET index/demo/stable/hint",
        "GET index/demo/stable/0000000001.dsse.json",
        "GET index/demo/stable/0000000002.dsse.json",
        "GET statement.dsse.json",
        "GET packs",  # the table
        *["GET packs"] * len(demo.statement.packs),
    ])  # fmt: skip


def test_with_a_lock_file_it_asks_for_statement_table_and_packs(
    tmp_path: Path, proxy: FaultProxy, url: str, demo: Published, reads: dict[str, str]
) -> None:
    ran = restore(tmp_path, url, "--lock", demo.lock, *command(["true"]), env={**ENVIRONMENT, **reads})
    assert ran.line["outcome"] == "restored", ran.err
    assert sorted(kinds(proxy)) == sorted(["GET statement.dsse.json", *["GET packs"] * (1 + len(demo.statement.packs))])


def test_a_present_folder_costs_hint_and_probe_or_nothing(
    tmp_path: Path, proxy: FaultProxy, url: str, demo: Published, reads: dict[str, str]
) -> None:
    dest = ("--dest", str(tmp_path / "here"))
    env = {**ENVIRONMENT, **reads}
    restore(tmp_path, url, *dest, *command(["true"]), env=env)
    proxy.clear()
    assert restore(tmp_path, url, *dest, *command(["true"]), env=env).line["outcome"] == "present"
    assert kinds(proxy) == ["GET index/demo/stable/hint", "GET index/demo/stable/0000000002.dsse.json"]
    proxy.clear()
    assert restore(tmp_path, url, *dest, "--lock", demo.lock, *command(["true"]), env=env).line["outcome"] == "present"
    assert proxy.requests() == []


def test_a_role_that_may_not_list_takes_403_for_the_end_of_the_versions(
    tmp_path: Path, proxy: FaultProxy, url: str, demo: Published, reads: dict[str, str]
) -> None:
    proxy.add(Fault("hide", method="GET", times=None))
    ran = restore(tmp_path, url, *command(["true"]), env={**READER, **reads})
    assert ran.line["outcome"] == "restored", ran.err
    assert ran.line["store"] == "absent_by_403:1"
    assert files_below(demo.root) == demo.restored_bytes(demo.root)
    again = restore(tmp_path, url, "--dest", demo.root, *command(["true"]), env={**READER, **reads})
    assert (again.line["outcome"], again.line["store"]) == ("present", "absent_by_403:1")


def test_such_a_role_is_told_when_nothing_is_published(
    tmp_path: Path, proxy: FaultProxy, url: str, reads: dict[str, str]
) -> None:
    proxy.add(Fault("hide", method="GET", times=None))
    ran = run_restore(tmp_path, url, "--name", "absent", "--strict", env=environment(tmp_path, **{**READER, **reads}))
    assert ran.code == 15
    assert ran.line["store"] == "forbidden:1"
    assert "s3:GetObject" in ran.line["hint"]
    assert "or it is absent" in ran.line["reason"]


def test_a_reader_can_restore_and_cannot_publish(tmp_path: Path, url: str) -> None:
    assert restore(tmp_path, url, *command(["true"]), env=READER).line["outcome"] == "restored"
    done = run_cachepipe(
        "promote", url, "--name", "demo", "--from", "stable", "--to", "x", env=environment(tmp_path, **READER)
    )
    assert done.returncode == 15
    assert "s3:PutObject" in done.stderr


# --- the whole way -----------------------------------------------------------------------------------------------------


def test_promote_lock_show_and_restore_by_the_command_line(tmp_path: Path, url: str, demo: Published) -> None:
    env = environment(tmp_path, **ENVIRONMENT, CACHEPIPE_STORE=url)

    def cachepipe(*words: str) -> str:
        done = run_cachepipe(*words, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cachepipe("promote", "--name", "demo", "--from", "stable", "--to", "canary")
    cachepipe("lock", url, "--name", "demo", "--channel", "canary", "--output", str(tmp_path / "canary.lock"))
    assert {"stable", "canary"} == {row["channel"] for row in json.loads(cachepipe("ls", url, "--json"))["channels"]}
    assert json.loads(cachepipe("show", url, "demo@canary", "--json"))
    ran = restore(tmp_path, url, "--lock", str(tmp_path / "canary.lock"), *command(["true"]))
    assert ran.line["outcome"] == "restored", ran.err
    assert files_below(demo.root) == demo.restored_bytes(demo.root)


def test_over_tls_with_an_authority_of_its_own(
    tmp_path: Path, s3_server: seaweed.Seaweed, demo: Published, opened: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(s3_server.ca_bundle))
    url = s3.address(s3_server.tls_endpoint)
    s3.copy_store(demo.store, s3.opened(url))
    without = restore(tmp_path, url, *command(["true"]))
    assert without.line["outcome"] == "cold"
    assert "AWS_CA_BUNDLE" in without.line["hint"]
    ran = restore(tmp_path, url, *command(["true"]), env={**ENVIRONMENT, "AWS_CA_BUNDLE": str(s3_server.ca_bundle)})
    assert ran.line["outcome"] == "restored", ran.err
    assert files_below(demo.root) == demo.restored_bytes(demo.root)


def test_with_a_profile_boto3_reads_the_same_bytes(
    tmp_path: Path, proxy: FaultProxy, url: str, demo: Published
) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"[profile ci]\nregion = us-east-1\naws_access_key_id = {seaweed.READER[0]}\n"
        f"aws_secret_access_key = {seaweed.READER[1]}\n"
    )
    env = {name: value for name, value in ENVIRONMENT.items() if "KEY" not in name}
    ran = restore(tmp_path, url, *command(["true"]), env={**env, "AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "ci"})
    assert ran.line["outcome"] == "restored", ran.err
    assert files_below(demo.root) == demo.restored_bytes(demo.root)
    assert not proxy.requests(path=r"list-type")


def test_the_service_starts_when_the_store_is_away(tmp_path: Path) -> None:
    began = time.monotonic()
    ran = restore(tmp_path, s3.address("http://127.0.0.1:1"), *command())
    assert ran.code == 0
    assert ran.line["outcome"] == "cold"
    assert ran.line["store"] == "unusable:1"
    assert "does not answer" in ran.line["reason"]
    assert time.monotonic() - began < 10


def test_boto3_and_torch_stay_out_of_a_restore(tmp_path: Path, url: str) -> None:
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import sys\n"
        "def hook(event, args):\n"
        "    if event == 'os.exec' and args[0].endswith('true'):\n"
        f"        open({str(tmp_path / 'modules')!r}, 'w').write(' '.join(sys.modules))\n"
        "sys.addaudithook(hook)\n"
    )
    env = environment(tmp_path, **ENVIRONMENT)
    env["PYTHONPATH"] = f"{hook}:{env['PYTHONPATH']}"
    run_restore(tmp_path, url, "--name", "demo", *command(["/bin/true"]), env=env)
    loaded = set((tmp_path / "modules").read_text().split())
    assert "obstore" in loaded
    heavy = {"torch", "boto3", "botocore", "urllib3", "pydantic", "rich", "click", "securesystemslib", "asyncio"}
    assert not loaded & heavy


# --- limits of time ----------------------------------------------------------------------------------------------------


def test_case_k3_a_service_does_not_wait_for_a_metadata_service_that_hangs(
    tmp_path: Path, reads: dict[str, str]
) -> None:
    env = {name: value for name, value in ENVIRONMENT.items() if "KEY" not in name and "DISABLED" not in name}
    env |= {"AWS_METADATA_SERVICE_TIMEOUT": "60"}  # or boto3 gives up after 1 s
    with SilentServer() as silent:
        url = s3.address("http://127.0.0.1:1")
        env |= {"AWS_EC2_METADATA_SERVICE_ENDPOINT": silent.url, **reads}
        ran = restore(tmp_path, url, *command(["true"]), env=env)
    assert ran.code == 0
    assert ran.line["outcome"] == "cold"
    assert "no answer within 5 s; asked: env" in ran.line["reason"]
    assert ran.line["store"] == "credentials:1"
    assert 4.5 < float(ran.line["seconds"]) < 7


def test_a_store_that_stalls_holds_a_service_no_longer_than_its_deadline(
    tmp_path: Path, proxy: FaultProxy, url: str
) -> None:
    proxy.add(Fault("hang", path="/packs/", seconds=60, times=None))
    ran = restore(tmp_path, url, "--deadline", "2", *command(["true"]))
    assert (ran.code, ran.line["outcome"]) == (0, "cold")
    assert 2 <= float(ran.line["seconds"]) < 4
    assert ran.line["reason"].startswith(("not restored within 2 seconds", "time ran out"))


def test_the_first_request_leaves_soon_after_the_process_began(tmp_path: Path, proxy: FaultProxy, url: str) -> None:
    """The target is 0.15 s on a quiet machine (`ci/bench --store`); here only what a heavy import would break."""
    restore(tmp_path, url, *command(["true"]))
    shares = []
    for _ in range(3):
        proxy.clear()
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import cachepipe.workflows.serve"], check=True)
        bare_s, began = time.monotonic() - began, time.monotonic()
        run_restore(tmp_path, url, "--name", "absent", env=environment(tmp_path, **ENVIRONMENT))
        shares.append((proxy.accepted[0] - began) / bare_s)
    assert min(shares) < 4


def test_a_bucket_encrypted_with_kms_is_published_to_and_restored_from(
    tmp_path: Path, demo: Published, opened: None, moto_s3: motoserver.Moto
) -> None:
    client = boto3.client("s3", endpoint_url=moto_s3.endpoint)
    client.create_bucket(Bucket="encrypted")
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "alias/bucket"}}
    client.put_bucket_encryption(Bucket="encrypted", ServerSideEncryptionConfiguration={"Rules": [rule]})
    url = s3.address(moto_s3.endpoint).replace(seaweed.S3_BUCKET, "encrypted", 1)
    s3.copy_store(demo.store, s3.opened(url))
    keys = [row["Key"] for row in client.list_objects_v2(Bucket="encrypted")["Contents"]]
    algorithms = {client.head_object(Bucket="encrypted", Key=key).get("ServerSideEncryption") for key in keys}
    assert len(keys) > 4 and algorithms == {"aws:kms"}
    ran = restore(tmp_path, url, "--strict", *command(["true"]))
    assert (ran.code, ran.line["outcome"]) == (0, "restored")
    assert files_below(ran.line["folder"]) == demo.restored_bytes(ran.line["folder"])


def test_what_a_later_try_made_good_is_counted_in_the_starts_line(
    tmp_path: Path, proxy: FaultProxy, url: str, demo: Published
) -> None:
    """One pack is refused as often as a client tries, then given: the restore asks again, and says so."""
    proxy.add(Fault("status", path=demo.statement.packs[0].digest, status=503, code="SlowDown", times=5))
    ran = restore(tmp_path, url, "--strict", *command(["true"]))
    assert (ran.code, ran.line["outcome"], ran.line["store"]) == (0, "restored", "slow_down:1")
    assert proxy.count(path=demo.statement.packs[0].digest) == 6
