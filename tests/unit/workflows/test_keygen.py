"""keygen: a private key that only its owner reads, and a policy that lists its public half; never anything lost."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters import signer
from cachepipe.adapters.policy_file import read_policy_file
from cachepipe.cli.main import main
from cachepipe.domain.policy import ChannelRule, read_policy
from cachepipe.errors import TrustError, UnsafePathError, UsageError
from cachepipe.workflows.keygen import KeyRequest, keygen, load_policy, retire, save_policy
from tests.support.authority import key, policy
from tests.support.kms import kms_client


def request(folder: Path, name: str = "s", *roles: str, **more: str) -> KeyRequest:
    return KeyRequest(str(folder / f"{name}.key"), roles or ("statement",), folder / "trust.json", **more)


def test_a_new_key_is_private_and_its_public_half_is_in_the_policy(tmp_path: Path) -> None:
    made = keygen(request(tmp_path))
    assert stat.S_IMODE((tmp_path / "s.key").stat().st_mode) == 0o600
    assert load_policy(tmp_path / "trust.json").keys == (made,)
    assert read_policy_file(str(tmp_path / "trust.json")) is not None
    assert signer.open_signer(f"file:{tmp_path}/s.key").public_key.keyid == made.keyid
    assert "PRIVATE" not in (tmp_path / "trust.json").read_text()


def test_an_existing_key_is_listed_and_never_replaced(tmp_path: Path) -> None:
    first = keygen(request(tmp_path))
    before = (tmp_path / "s.key").read_bytes()
    again = keygen(request(tmp_path, "s", "index"))
    assert (tmp_path / "s.key").read_bytes() == before
    assert (again.keyid, again.roles) == (first.keyid, ("index", "statement"))
    assert len(load_policy(tmp_path / "trust.json").keys) == 1


def test_of_several_at_once_into_one_policy_none_is_lost(tmp_path: Path) -> None:
    def one(number: int) -> str:
        return keygen(request(tmp_path, str(number))).keyid

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(one, range(8)))
    assert {key.keyid for key in load_policy(tmp_path / "trust.json").keys} == made
    assert len(made) == 8


def test_another_role_is_no_reason_to_live_longer(tmp_path: Path) -> None:
    keygen(request(tmp_path, not_after="2027-03-01T00:00:00Z"))
    keygen(request(tmp_path, "s", "index"))
    (listed,) = load_policy(tmp_path / "trust.json").keys
    assert (listed.not_after, listed.roles) == ("2027-03-01T00:00:00Z", ("index", "statement"))
    assert keygen(request(tmp_path, not_after="2028-03-01T00:00:00Z")).not_after == "2028-03-01T00:00:00Z"


def test_a_full_disk_leaves_no_half_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(UnsafePathError, match="No space left"):
        patched.setattr(os, "fsync", full)
        keygen(request(tmp_path))
    assert os.listdir(tmp_path) == []
    keygen(request(tmp_path))


def test_rules_that_people_wrote_stay(tmp_path: Path) -> None:
    written = policy(channels={"stable": ChannelRule(7)}, revoked=("a" * 64,))
    save_policy(tmp_path / "trust.json", written)
    keygen(request(tmp_path, "new", "index"))
    found = load_policy(tmp_path / "trust.json")
    assert (found.channels, found.revoked, len(found.keys)) == (written.channels, written.revoked, 3)


def test_the_policy_is_written_for_people_one_field_a_line(tmp_path: Path) -> None:
    keygen(request(tmp_path, not_after="2027-03-01T00:00:00Z"))
    text = (tmp_path / "trust.json").read_text()
    assert json.loads(text)["keys"][0]["not_after"] == "2027-03-01T00:00:00Z"
    assert len(text.splitlines()) > 10
    assert read_policy(text.encode()) == load_policy(tmp_path / "trust.json")


def test_a_policy_with_problems_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_text('{"format":1,"keys":[],"revokd":[]}')
    with pytest.raises(TrustError, match="revokd"):
        keygen(request(tmp_path))
    assert "revokd" in (tmp_path / "trust.json").read_text()
    assert not (tmp_path / "s.key").exists()


def test_a_policy_behind_a_link_is_replaced_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save_policy(tmp_path / "real" / "p.json", policy())
    (tmp_path / "trust.json").symlink_to("real/p.json")
    keygen(request(tmp_path))
    assert (tmp_path / "trust.json").is_symlink()
    assert len(load_policy(tmp_path / "real" / "p.json").keys) == 3


@pytest.mark.parametrize("when", ["tomorrow", "2027-03-01", "2027-03-01T00:00:00+01:00"])
def test_an_end_that_is_no_time_is_a_mistake_of_usage(tmp_path: Path, when: str) -> None:
    with pytest.raises(UsageError, match="not a time"):
        keygen(request(tmp_path, not_after=when))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError, match="absent"):
        keygen(KeyRequest(str(tmp_path / "absent" / "k"), ("index",), tmp_path / "trust.json"))


def test_retire_takes_one_key_out_and_only_by_enough_digits(tmp_path: Path) -> None:
    save_policy(tmp_path / "trust.json", policy())
    with pytest.raises(UsageError, match="0 keys"):
        retire(tmp_path / "trust.json", "00000000")
    with pytest.raises(UsageError):
        retire(tmp_path / "trust.json", key("s").keyid[:7])
    retire(tmp_path / "trust.json", key("s").keyid[:8])
    assert load_policy(tmp_path / "trust.json").keys == (key("i", "index"),)


def test_retire_refuses_to_leave_a_threshold_that_cannot_be_reached(tmp_path: Path) -> None:
    two = policy(key("i", "index"), key("i2", "index"), thresholds={"index": 2})
    save_policy(tmp_path / "trust.json", two)
    with pytest.raises(TrustError, match="threshold of index"):
        retire(tmp_path / "trust.json", key("i").keyid)
    assert load_policy(tmp_path / "trust.json") == two


# --- KMS ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    with kms_client() as client:
        yield client


def test_a_kms_alias_is_made_once_and_its_public_half_listed(tmp_path: Path, kms: Any) -> None:
    asked = KeyRequest("kms:alias/cachepipe-build", ("statement",), tmp_path / "trust.json")
    first = keygen(asked, kms)
    assert keygen(asked, kms) == first
    assert len(kms.list_keys()["Keys"]) == 1
    assert load_policy(tmp_path / "trust.json").keys == (first,)
    assert os.listdir(tmp_path) == ["trust.json"]


def test_keygen_by_the_command_line_with_the_environments_own_client(
    tmp_path: Path, kms: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--role",
        "index",
        "--key",
        "kms:alias/cachepipe-index",
        "--policy",
        str(tmp_path / "trust.json"),
        "--json",
    ]
    assert main(["keygen", *words]) == 0
    assert json.loads(capsys.readouterr().out)["roles"] == ["index"]
    assert kms.describe_key(KeyId="alias/cachepipe-index")["KeyMetadata"]["KeySpec"] == "ECC_NIST_P256"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "say which key"),
        (["--key", "k", "--retire", "12345678"], 2, "say which key"),
        (["--key", "k"], 2, "no role is given"),
        (["--key", "k", "--role", "dev"], 2, "'dev' is not one of"),
        (["--key", "kms:1234", "--role", "index"], 14, "there is no KMS key 1234"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path,
    kms: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", *words]) == code
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
