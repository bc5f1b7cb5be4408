"""KMS for tests: moto's, corrected where it is not like the real one; in this process, or served to command lines.

- moto takes a digest for a message and hashes it again ("MessageType DIGEST is not yet implemented", moto/kms/models.py,
  5.2.5); KMS signs the digest itself. cachepipe sends digests alone, so the keys here sign what they are given, unhashed.
- moto signs with a disabled key; KMS answers DisabledException to Sign and GetPublicKey.

python -m tests.support.kms        serves an empty KMS, tells its address on stdout, ends with its stdin
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import boto3
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256
from moto import mock_aws
from moto.core.exceptions import JsonRESTError
from moto.kms.models import KmsBackend
from moto.kms.utils import ECDSAPrivateKey

from tests.support.release import REPOSITORY

REGION = "eu-central-1"
_SIGN, _GET_PUBLIC_KEY = KmsBackend.sign, KmsBackend.get_public_key


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


@contextmanager
def _corrected() -> Iterator[None]:
    with ExitStack() as stack:
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
def kms_server() -> Iterator[dict[str, str]]:
    """Gives the variables by which AWS's own client finds an empty KMS in a process of its own."""
    words = [sys.executable, "-m", "tests.support.kms"]
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

    with _corrected():
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve()
