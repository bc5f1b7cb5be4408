"""What a signer signs, the verifier accepts; a key that is not private, or not ours to use, signs nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from cachepipe.adapters import signer
from cachepipe.adapters.kms import KmsKey
from cachepipe.domain import trust
from cachepipe.domain.policy import FORMAT, Key, Policy
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE
from cachepipe.errors import TrustError, UsageError
from tests.support import authority
from tests.support.kms import kms_client


def pem(private: Any, encryption: Any = None) -> bytes:
    data = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())
    assert isinstance(data, bytes)
    return data


def key_file(folder: Path, data: bytes, mode: int = 0o600) -> str:
    path = folder / "k.key"
    path.write_bytes(data)
    path.chmod(mode)
    return f"file:{path}"


def policy_of(opened: Any, *roles: str) -> Policy:
    public = opened.public_key.to_dict()["keyval"]["public"]
    return Policy(FORMAT, (Key(opened.public_key.keyid, public, roles),))


def test_a_file_key_signs_what_the_verifier_accepts(tmp_path: Path) -> None:
    opened = signer.open_signer(authority.write_key(tmp_path, "s"))
    envelope = signer.seal(b"{}\n", STATEMENT_PAYLOAD_TYPE, [opened])
    found = trust.verify(envelope, STATEMENT_PAYLOAD_TYPE, "x", policy_of(opened, "statement"), None)
    assert (found.payload, found.status) == (b"{}\n", "signed")


def test_an_envelope_is_the_same_dsse_that_securesystemslib_verifies(tmp_path: Path) -> None:
    from securesystemslib.dsse import Envelope

    opened = signer.open_signer(authority.write_key(tmp_path, "s"))
    envelope = signer.seal(b"payload", "some/type", [opened])
    assert Envelope.from_dict(json.loads(envelope)).verify([opened.public_key], 1)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read_signs_nothing(tmp_path: Path, mode: int) -> None:
    with pytest.raises(TrustError, match="not private") as caught:
        signer.open_signer(key_file(tmp_path, authority.new_key("s").private, mode))
    assert "chmod 0600" in caught.value.hint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a private key"),
        (b"garbage", "not a private key"),
        (authority.new_key("s").public.encode(), "not a private key"),
        (pem(ec.generate_private_key(ec.SECP384R1())), "P-256"),
        (pem(rsa.generate_private_key(65537, 2048)), "P-256"),
        (pem(ec.generate_private_key(ec.SECP256R1()), BestAvailableEncryption(b"x")), "without password"),
    ],
)
def test_what_is_no_p256_key_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(TrustError, match=message) as caught:
        signer.open_signer(key_file(tmp_path, data))
    assert "k.key" in str(caught.value)


def test_a_key_that_is_absent_a_folder_or_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe"):
        with pytest.raises(TrustError):
            signer.open_signer(f"file:{path}")


@pytest.mark.parametrize("address", ["", "k.key", "vault:x", "FILE:x", "/k.key"])
def test_another_kind_of_address_is_a_mistake_of_usage(address: str) -> None:
    with pytest.raises(UsageError, match="not a key"):
        signer.open_signer(address)


# --- KMS (moto, in this process) -----------------------------------------------------------------------------------------


@pytest.fixture
def kms() -> Iterator[Any]:
    with kms_client() as client:
        yield client


def test_kms_is_sent_a_digest_said_to_be_one(kms: Any) -> None:
    KmsKey("alias/build", kms).create()
    sent: list[dict[str, Any]] = []
    kms.meta.events.register("provide-client-params.kms.Sign", lambda params, **_: sent.append(params))
    KmsKey("alias/build", kms).sign(b"message")
    assert [(params["MessageType"], params["Message"]) for params in sent] == [
        ("DIGEST", hashlib.sha256(b"message").digest())
    ]


def agents(kms: Any) -> list[tuple[str, str]]:
    """Returns a list to which every request to sign adds the digest in its body and its User-Agent."""
    sent: list[tuple[str, str]] = []

    def keep(request: Any, **_: Any) -> None:
        agent = request.headers["User-Agent"]
        digest = base64.b64decode(json.loads(request.body)["Message"]).hex()
        sent.append((digest, agent.decode() if isinstance(agent, bytes) else agent))

    kms.meta.events.register("before-send.kms.Sign", keep)
    return sent


def test_every_request_names_the_digest_that_it_has_signed_once_whoever_shares_the_client(kms: Any) -> None:
    KmsKey("alias/build", kms).create()
    keys, sent = [KmsKey("alias/build", kms) for _ in range(3)], agents(kms)
    messages = [b"message %d" % number for number in range(60)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: keys[number % 3].sign(messages[number]), range(60)))
    keys[0].rehearse(b"a trial")
    assert sorted(digest for digest, _ in sent) == sorted(
        hashlib.sha256(one).hexdigest() for one in [*messages, b"a trial"]
    )
    assert all(re.findall("cachepipe.*", agent) == [f"cachepipe#sha256.{digest}"] for digest, agent in sent)


def test_a_request_that_is_sent_again_names_its_digest_once(kms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    KmsKey("alias/build", kms).create()
    sent, failures = agents(kms), [AWSResponse("http://kms", 500, {}, None)]
    failures[0]._content = b"{}"
    kms.meta.events.register_last("before-send.kms.Sign", lambda **_: failures.pop() if failures else None)
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    KmsKey("alias/build", kms).sign(b"message")
    assert len(sent) == 2 and sent[0] == sent[1] and sent[0][1].count("cachepipe") == 1


def test_what_others_sign_with_the_same_client_is_not_named_as_ours(kms: Any) -> None:
    KmsKey("alias/build", kms).create()
    sent = agents(kms)
    asked = {"KeyId": "alias/build", "Message": b"r" * 32, "MessageType": "RAW", "SigningAlgorithm": "ECDSA_SHA_256"}
    kms.sign(**asked)
    kms.get_public_key(KeyId="alias/build")
    assert len(sent) == 1 and "cachepipe" not in sent[0][1]


def test_the_name_of_a_digest_is_no_part_of_what_botocore_signs(kms: Any) -> None:
    KmsKey("alias/build", kms).create()
    headers: list[Any] = []
    kms.meta.events.register("before-send.kms.Sign", lambda request, **_: headers.append(request.headers))
    KmsKey("alias/build", kms).sign(b"message")
    signed = str(headers[0]["Authorization"]).partition("SignedHeaders=")[2].partition(",")[0]
    assert "host" in signed and "user-agent" not in signed


def test_a_rehearsal_asks_whether_kms_would_sign_and_has_nothing_signed(kms: Any) -> None:
    KmsKey("alias/build", kms).create()
    answers: list[Any] = []
    kms.meta.events.register("after-call.kms.Sign", lambda parsed, **_: answers.append(parsed))
    opened = signer.open_signer("kms:alias/build", kms_client=kms)
    assert signer.rehearse(b"x", STATEMENT_PAYLOAD_TYPE, [opened, opened]) == [opened.public_key.keyid]
    assert [answer["Error"]["Code"] for answer in answers] == ["DryRunOperationException"] * 2
    kms.disable_key(KeyId=kms.describe_key(KeyId="alias/build")["KeyMetadata"]["KeyId"])
    with pytest.raises(TrustError, match=r"alias/build: no signature: .*DisabledException"):
        signer.rehearse(b"x", STATEMENT_PAYLOAD_TYPE, [opened])


def test_a_kms_key_signs_what_the_verifier_accepts(kms: Any) -> None:
    KmsKey("alias/build", kms).create()
    opened = signer.open_signer("kms:alias/build", kms_client=kms)
    payload = b"x" * 200_000  # beyond the 4,096 bytes that KMS takes raw
    envelope = signer.seal(payload, STATEMENT_PAYLOAD_TYPE, [opened])
    found = trust.verify(envelope, STATEMENT_PAYLOAD_TYPE, "x", policy_of(opened, "statement"), None)
    assert (found.payload, found.status) == (payload, "signed")


def test_a_file_key_and_a_kms_key_sign_together(kms: Any, tmp_path: Path) -> None:
    KmsKey("alias/build", kms).create()
    both = [
        signer.open_signer("kms:alias/build", kms_client=kms),
        signer.open_signer(authority.write_key(tmp_path, "s")),
    ]
    envelope = signer.seal(b"x", STATEMENT_PAYLOAD_TYPE, both)
    keys = tuple(key for opened in both for key in policy_of(opened, "statement").keys)
    policy = Policy(FORMAT, keys, {"statement": 2})
    assert trust.verify(envelope, STATEMENT_PAYLOAD_TYPE, "x", policy, None).status == "signed"


def test_an_alias_that_does_not_exist_is_named(kms: Any) -> None:
    with pytest.raises(TrustError, match="no KMS key alias/none") as caught:
        signer.open_signer("kms:alias/none", kms_client=kms)
    assert "keygen" in caught.value.hint


def test_a_key_of_another_kind_is_refused_before_anything_is_signed(kms: Any) -> None:
    made = kms.create_key(KeySpec="RSA_2048", KeyUsage="SIGN_VERIFY")["KeyMetadata"]["KeyId"]
    with pytest.raises(TrustError, match="ECDSA_SHA_256"):
        signer.open_signer(f"kms:{made}", kms_client=kms)


def test_a_key_that_is_gone_signs_nothing_and_says_so(kms: Any) -> None:
    KmsKey("alias/build", kms).create()
    opened = signer.open_signer("kms:alias/build", kms_client=kms)
    kms.delete_alias(AliasName="alias/build")
    with pytest.raises(TrustError, match="alias/build: no signature") as caught:
        signer.seal(b"x", STATEMENT_PAYLOAD_TYPE, [opened])
    assert "kms:Sign" in caught.value.hint


def test_only_an_alias_is_made(kms: Any) -> None:
    with pytest.raises(TrustError, match="there is no KMS key 1234"):
        KmsKey("1234", kms).create()


def test_kms_that_cannot_be_reached_is_a_trust_error() -> None:
    from botocore.config import Config

    config = Config(connect_timeout=1, retries={"total_max_attempts": 1})
    where: dict[str, Any] = {"region_name": "x", "endpoint_url": "http://127.0.0.1:9", "config": config}
    dead = boto3.client("kms", aws_access_key_id="x", aws_secret_access_key="x", **where)
    one = KmsKey("alias/x", dead)
    for ask in (one.public_key, lambda: one.sign(b"x"), lambda: one.rehearse(b"x")):
        with pytest.raises(TrustError, match="alias/x: no"):
            ask()
    with pytest.raises(TrustError, match="no creation"):
        KmsKey("alias/x", dead).create()


def test_a_missing_region_is_a_mistake_of_usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UsageError, match="no KMS client") as caught:
        KmsKey("alias/x")
    assert "AWS_REGION" in caught.value.hint


@pytest.mark.parametrize(
    ("key_id", "variables", "region"),
    [
        ("alias/build", {"AWS_REGION": "eu-west-1"}, "eu-west-1"),
        ("alias/build", {"AWS_DEFAULT_REGION": "eu-west-3"}, "eu-west-3"),
        ("alias/build", {"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-3"}, "eu-west-1"),
        ("arn:aws:kms:us-west-2:123456789012:alias/build", {"AWS_REGION": "eu-west-1"}, "us-west-2"),
        ("arn:aws:kms:us-west-2:123456789012:key/1234", {}, "us-west-2"),
    ],
)
def test_kms_is_asked_in_the_region_of_the_key_as_a_store_is_in_its_own(
    monkeypatch: pytest.MonkeyPatch, key_id: str, variables: dict[str, str], region: str
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert KmsKey(key_id)._client.meta.region_name == region
