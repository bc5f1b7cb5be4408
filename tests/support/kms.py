"""KMS for tests: moto's, corrected where it is not like the real one; in this process, or served to command lines.

- moto takes a digest for a message and hashes it again ("MessageType DIGEST is not yet implemented", moto/kms/models.py,
  5.2.5); KMS signs the digest itself. cachepipe sends digests alone, so the keys here sign what they are given, unhashed.
- moto signs with a disabled key; KMS answers DisabledException to Sign and GetPublicKey.
- moto signs in a dry run; KMS signs nothing and answers DryRunOperationException where it would have signed.
- moto answers GetPublicKey with the key's id; KMS with its ARN.

With a folder it keeps the log that CloudTrail keeps of Sign and GetPublicKey: one file, of the name and in the folder that a trail
would give it, for every request that came over HTTP, refused ones too.

python -m tests.support.kms [LOG]  serves an empty KMS, tells its address on stdout, ends with its stdin
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256
from moto import mock_aws
from moto.core.exceptions import JsonRESTError
from moto.kms.models import KmsBackend
from moto.kms.responses import KmsResponse
from moto.kms.utils import ECDSAPrivateKey

from tests.support.release import REPOSITORY

REGION, ACCOUNT = "eu-central-1", "123456789012"
_SIGN, _GET_PUBLIC_KEY = KmsBackend.sign, KmsBackend.get_public_key
_ANSWERS = {"Sign": KmsResponse.sign, "GetPublicKey": KmsResponse.get_public_key}


def _sign_digest(self: Any, message: bytes, signing_algorithm: str) -> bytes:
    assert signing_algorithm == "ECDSA_SHA_256"
    assert len(message) == 32, "a SHA-256 digest"
    signature = self.private_key.sign(message, ECDSA(Prehashed(SHA256())))
    assert isinstance(signature, bytes)
    return signature


def _check_enabled(backend: KmsBackend, key_id: str) -> None:
    key = backend.describe_key(key_id)
    if not key.enabled:
        raise JsonRESTError("DisabledException", f"{key.arn} is disabled.")


def _sign(self: KmsBackend, key_id: str, message: bytes, signing_algorithm: str) -> tuple[str, bytes, str]:
    _check_enabled(self, key_id)
    return _SIGN(self, key_id, message, signing_algorithm)


def _get_public_key(self: KmsBackend, key_id: str) -> Any:
    _check_enabled(self, key_id)
    return _GET_PUBLIC_KEY(self, key_id)


def _answer(action: str, log: Path | None) -> Any:
    def answer(self: KmsResponse) -> str:
        error = None
        try:
            found = json.loads(_ANSWERS[action](self))
            found["KeyId"] = self.kms_backend.describe_key(self._get_param("KeyId")).arn
            if self._get_param("DryRun"):
                raise JsonRESTError("DryRunOperationException", "The request would have succeeded.")
            return json.dumps(found)
        except JsonRESTError as refused:
            error = refused
            raise
        finally:
            if log is not None:
                _write_record(self, action, error, log)

    return answer


def _write_record(request: KmsResponse, action: str, error: JsonRESTError | None, log: Path) -> None:
    """Leaves the record of one request. Source: AWS KMS Developer Guide, example of a CloudTrail log entry of Sign."""
    key_id, now = request._get_param("KeyId"), datetime.now(timezone.utc)
    asked = {"keyId": key_id}
    if action == "Sign":
        asked |= {
            "messageType": request._get_param("MessageType") or "RAW",
            "signingAlgorithm": request._get_param("SigningAlgorithm"),
        }
    record: dict[str, Any] = {
        "eventVersion": "1.08",
        "userIdentity": {
            "type": "IAMUser",
            "arn": f"arn:aws:iam::{ACCOUNT}:user/{request.access_key}",
            "accountId": ACCOUNT,
        },
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "eventSource": "kms.amazonaws.com",
        "eventName": action,
        "awsRegion": REGION,
        "sourceIPAddress": "127.0.0.1",
        "userAgent": request.headers["User-Agent"],
        "requestParameters": asked,
        "responseElements": None,
        "requestID": str(uuid.uuid4()),
        "eventID": str(uuid.uuid4()),
        "readOnly": True,
        "eventType": "AwsApiCall",
        "managementEvent": True,
        "recipientAccountId": ACCOUNT,
        "eventCategory": "Management",
    }
    if error is not None:
        record |= {"errorCode": error.error_type, "errorMessage": error.message}
    else:
        arn = request.kms_backend.describe_key(key_id).arn
        record["resources"] = [{"accountId": ACCOUNT, "type": "AWS::KMS::Key", "ARN": arn}]
    folder = log / f"AWSLogs/{ACCOUNT}/CloudTrail/{REGION}/{now:%Y/%m/%d}"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{ACCOUNT}_CloudTrail_{REGION}_{now:%Y%m%dT%H%MZ}_{uuid.uuid4().hex[:16]}.json.gz"
    (folder / name).write_bytes(gzip.compress(json.dumps({"Records": [record]}).encode()))


@contextmanager
def _corrected(log: Path | None = None) -> Iterator[None]:
    with ExitStack() as stack:
        for name, action in (("sign", "Sign"), ("get_public_key", "GetPublicKey")):
            stack.enter_context(patch.object(KmsResponse, name, _answer(action, log)))
        stack.enter_context(patch.object(ECDSAPrivateKey, "sign", _sign_digest))
        stack.enter_context(patch.object(KmsBackend, "sign", _sign))
        stack.enter_context(patch.object(KmsBackend, "get_public_key", _get_public_key))
        yield


@contextmanager
def kms_client() -> Iterator[Any]:
    """Gives boto3's client of an empty KMS in this process."""
    with mock_aws(), _corrected():
        yield boto3.client("kms", region_name=REGION, aws_access_key_id="x", aws_secret_access_key="x")


@contextmanager
def kms_server(log: Path | None = None) -> Iterator[dict[str, str]]:
    """Gives the variables by which AWS's own client finds an empty KMS in a process of its own; `log`: where it keeps its log."""
    words = [sys.executable, "-m", "tests.support.kms", *([str(log)] if log else [])]
    with subprocess.Popen(
        words, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            yield {
                "AWS_ENDPOINT_URL_KMS": address,
                "AWS_REGION": REGION,
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "x",
                "AWS_CONFIG_FILE": "/nonexistent/config",
                "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/credentials",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        finally:
            process.kill()


def _serve() -> None:
    from moto.server import ThreadedMotoServer

    with _corrected(Path(sys.argv[1]) if sys.argv[1:] else None):
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
