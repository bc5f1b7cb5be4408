"""KMS in this process: moto's, with the one correction that its own source asks for.

moto takes a digest for a message and hashes it again ("MessageType DIGEST is not yet implemented", moto/kms/models.py,
5.2.5); KMS signs the digest itself. cachepipe sends digests alone, so the keys here sign what they are given, unhashed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import boto3
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hashes import SHA256
from moto import mock_aws
from moto.kms.utils import ECDSAPrivateKey

REGION = "eu-central-1"


def _sign_digest(self: Any, message: bytes, signing_algorithm: str) -> bytes:
    assert signing_algorithm == "ECDSA_SHA_256"
    assert len(message) == 32, "a SHA-256 digest"
    signature = self.private_key.sign(message, ECDSA(Prehashed(SHA256())))
    assert isinstance(signature, bytes)
    return signature


@contextmanager
def kms_client() -> Iterator[Any]:
    """Gives boto3's client of an empty KMS."""
    with mock_aws(), patch.object(ECDSAPrivateKey, "sign", _sign_digest):
        yield boto3.client("kms", region_name=REGION, aws_access_key_id="x", aws_secret_access_key="x")
