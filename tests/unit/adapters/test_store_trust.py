"""Whose signatures count where no policy says it, and what a policy file must be like to count."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cachepipe.adapters import policy_file
from cachepipe.adapters.dev_keys import FOLDER, PRIVATE, dev_key, dev_policy
from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.policy_file import read_policy_file
from cachepipe.adapters.signer import generate
from cachepipe.adapters.store import TrustChoice
from cachepipe.domain.index import PAYLOAD_TYPE
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE
from cachepipe.errors import TrustError
from tests.support import authority
from tests.support.authority import key, policy, write_policy
from tests.support.users import OTHER_ID

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")


# --- policy files --------------------------------------------------------------------------------------------------------


def test_a_named_policy_is_read_and_a_missing_default_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_policy(tmp_path / "p.json")
    assert read_policy_file(path) == Path(path).read_bytes()
    monkeypatch.setattr(policy_file, "DEFAULT_POLICY", str(tmp_path / "absent" / "trust.json"))
    assert read_policy_file("") is None
    monkeypatch.setattr(policy_file, "DEFAULT_POLICY", path)
    assert read_policy_file("") == Path(path).read_bytes()


def test_a_named_policy_that_is_missing_is_never_no_policy(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="cannot be used"):
        read_policy_file(str(tmp_path / "absent"))


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646, 0o622])
def test_a_policy_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = Path(write_policy(tmp_path / "p.json"))
    path.chmod(mode)
    with pytest.raises(TrustError, match="others could change it"):
        read_policy_file(str(path))


@is_root
def test_a_policy_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write_policy(tmp_path / "p.json")
    os.chown(path, OTHER_ID, OTHER_ID)
    with pytest.raises(TrustError, match=f"owner uid {OTHER_ID}"):
        read_policy_file(path)


def test_a_policy_that_is_a_folder_a_pipe_or_endless_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "long").write_bytes(b" " * (LIMITS.small_file_bytes + 1))
    (tmp_path / "long").chmod(0o600)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "long", Path("/dev/zero")):
        with pytest.raises(TrustError):
            read_policy_file(str(path))


def test_a_policy_behind_a_link_is_read_as_config_maps_mount_it(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    path = write_policy(tmp_path / "..data" / "trust.json")
    (tmp_path / "trust.json").symlink_to("..data/trust.json")
    assert read_policy_file(str(tmp_path / "trust.json")) == Path(path).read_bytes()


# --- development keys ----------------------------------------------------------------------------------------------------


def test_development_keys_are_made_private_and_once(tmp_path: Path) -> None:
    path, is_new = dev_key(str(tmp_path), generate)
    assert is_new
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert dev_key(str(tmp_path), generate) == (path, False)
    (found,) = dev_policy(str(tmp_path)).keys
    assert found.roles == ("dev",)
    assert sorted(os.listdir(tmp_path / FOLDER)) == sorted([PRIVATE, f"{found.keyid}.pub"])


def test_the_umask_does_not_open_a_development_key(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path, _ = dev_key(str(tmp_path), generate)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_of_two_publishers_at_once_one_key_wins_and_no_public_half_is_left_over(tmp_path: Path) -> None:
    made = []

    def slower() -> tuple[bytes, str, str]:
        made.append(dev_key(str(tmp_path), generate))  # the other publisher, in between
        return generate()

    path, is_new = dev_key(str(tmp_path), slower)
    assert (made, is_new) == ([(path, True)], False)
    assert len(dev_policy(str(tmp_path)).keys) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_development_key_that_others_can_read_is_not_used(tmp_path: Path, mode: int) -> None:
    path, _ = dev_key(str(tmp_path), generate)
    os.chmod(path, mode)
    with pytest.raises(TrustError, match="not private"):
        dev_key(str(tmp_path), generate)


@pytest.mark.parametrize("where", ["folder", "key"])
def test_a_public_key_where_others_can_write_is_not_believed(tmp_path: Path, where: str) -> None:
    dev_key(str(tmp_path), generate)
    (public,) = (tmp_path / FOLDER).glob("*.pub")
    (public if where == "key" else tmp_path / FOLDER).chmod(0o777)
    with pytest.raises(TrustError, match="others could have put there"):
        dev_policy(str(tmp_path))


@is_root
def test_a_public_key_of_another_user_is_not_believed(tmp_path: Path) -> None:
    dev_key(str(tmp_path), generate)
    (public,) = (tmp_path / FOLDER).glob("*.pub")
    os.chown(public, OTHER_ID, OTHER_ID)
    with pytest.raises(TrustError, match="others could have put there"):
        dev_policy(str(tmp_path))
    os.chown(tmp_path, OTHER_ID, OTHER_ID)  # the store's owner may
    assert dev_policy(str(tmp_path)).keys


def test_a_public_key_under_another_keys_name_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.trust.seal(b"x", PAYLOAD_TYPE)
    (public,) = (tmp_path / FOLDER).glob("*.pub")
    public.write_text(authority.new_key("stranger").public)
    with pytest.raises(TrustError, match="has the public key of"):
        _ = LocalStore(tmp_path).trust.policy


def test_a_link_among_the_development_keys_is_not_followed(tmp_path: Path) -> None:
    dev_key(str(tmp_path), generate)
    (tmp_path / FOLDER / f"dev-{'0' * 64}.pub").symlink_to("/etc/hostname")
    with pytest.raises(TrustError, match="cannot be read"):
        dev_policy(str(tmp_path))


def test_a_folder_among_the_development_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER / f"dev-{'0' * 64}.pub").mkdir(parents=True)
    with pytest.raises(TrustError):
        dev_policy(str(tmp_path))


def test_a_store_that_cannot_be_written_says_how_to_name_keys() -> None:
    with pytest.raises(TrustError, match="no development key can be made") as caught:
        dev_key("/proc/no-store", generate)
    assert "--statement-key" in caught.value.hint


# --- what a command's choice comes to --------------------------------------------------------------------------------------


def test_in_a_folder_store_without_a_policy_development_keys_sign_and_count(tmp_path: Path) -> None:
    writer = LocalStore(tmp_path)
    envelope = writer.trust.seal(b"x", STATEMENT_PAYLOAD_TYPE)
    assert len(writer.trust.notes) == 1
    assert "for trials, not for production" in writer.trust.notes[0]
    assert LocalStore(tmp_path).trust.verify(envelope, STATEMENT_PAYLOAD_TYPE, "x").status == "development key"


def test_a_development_key_of_another_store_does_not_count(tmp_path: Path) -> None:
    envelope = LocalStore(tmp_path / "a").trust.seal(b"x", STATEMENT_PAYLOAD_TYPE)
    LocalStore(tmp_path / "b").trust.seal(b"x", STATEMENT_PAYLOAD_TYPE)
    with pytest.raises(TrustError):
        LocalStore(tmp_path / "b").trust.verify(envelope, STATEMENT_PAYLOAD_TYPE, "x")


def test_a_store_that_adopts_anothers_keys_believes_what_is_copied(tmp_path: Path) -> None:
    one, other = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    envelope = one.trust.seal(b"x", STATEMENT_PAYLOAD_TYPE)
    own = other.trust.seal(b"y", STATEMENT_PAYLOAD_TYPE)
    for _ in range(2):
        other.trust.adopt(one.trust)
    for text in (envelope, own):
        assert LocalStore(tmp_path / "b").trust.verify(text, STATEMENT_PAYLOAD_TYPE, "x").status == "development key"
    assert sorted(path.name for path in (tmp_path / "b" / FOLDER).iterdir() if path.suffix == ".key") == [PRIVATE]


def test_a_policy_file_that_does_not_list_the_development_key_refuses_it(tmp_path: Path) -> None:
    envelope = LocalStore(tmp_path).trust.seal(b"x", STATEMENT_PAYLOAD_TYPE)
    choice = TrustChoice(policy_file=write_policy(tmp_path / "p.json"))
    with pytest.raises(TrustError, match="a development key that the policy does not list"):
        LocalStore(tmp_path, choice).trust.verify(envelope, STATEMENT_PAYLOAD_TYPE, "x")


def test_named_keys_count_in_their_own_roles_without_a_policy(tmp_path: Path) -> None:
    choice = TrustChoice(statement_key=authority.write_key(tmp_path, "s"), index_key=authority.write_key(tmp_path, "i"))
    store = LocalStore(tmp_path, choice)
    assert store.trust.verify(store.trust.seal(b"x", PAYLOAD_TYPE), PAYLOAD_TYPE, "x").status == "signed"
    assert {key.roles for key in store.trust.policy.keys} == {("statement",), ("index",)}
    assert not (tmp_path / FOLDER).exists()


def test_one_key_named_for_both_roles_has_both(tmp_path: Path) -> None:
    address = authority.write_key(tmp_path, "s")
    store = LocalStore(tmp_path, TrustChoice(statement_key=address, index_key=address))
    (found,) = store.trust.policy.keys
    assert found.roles == ("statement", "index")


def test_where_one_key_is_named_no_development_key_stands_in_for_the_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, TrustChoice(statement_key=authority.write_key(tmp_path, "s")))
    assert store.trust.can_sign("statement")
    assert not store.trust.can_sign("index")
    with pytest.raises(TrustError, match="no key to sign the index with") as caught:
        store.trust.seal(b"x", PAYLOAD_TYPE)
    assert "--index-key" in caught.value.hint


def test_several_keys_of_one_role_sign_together(tmp_path: Path) -> None:
    two = policy(key("i", "index"), key("i2", "index"), thresholds={"index": 2})
    store = LocalStore(tmp_path, authority.choice(tmp_path / "keys", two, index=("i", "i2")))
    assert store.trust.verify(store.trust.seal(b"x", PAYLOAD_TYPE), PAYLOAD_TYPE, "x").status == "signed"


def test_a_policy_whose_key_is_none_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    from dataclasses import replace

    broken = policy(
        replace(key("s", "statement"), public="-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    )
    with pytest.raises(TrustError, match="not of the curve P-256"):
        _ = LocalStore(tmp_path, TrustChoice(policy_file=write_policy(tmp_path / "p.json", broken))).trust.policy
