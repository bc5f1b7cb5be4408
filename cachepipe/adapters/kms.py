"""A signing key in AWS KMS, of which this process only ever sees the public half.

Key specification ECC_NIST_P256, usage SIGN_VERIFY. Rights: `kms:GetPublicKey` and `kms:Sign`; to make one `kms:CreateKey` and
`kms:CreateAlias` as well.

Each request to sign names the digest that it sends in its User-Agent, which AWS CloudTrail records where it records neither message
nor digest: `domain/kms_log.py` pairs what the log names with what a store holds.

Source: AWS KMS API Reference, Sign: with MessageType DIGEST and ECDSA_SHA_256 it takes the SHA-256 of the message, so that no
message is too long for it, and answers with a DER signature; with DryRun it looks at rights and parameters, signs nothing, and
answers DryRunOperationException where it would have signed. GetPublicKey: `KeyId` of the answer is the key's ARN.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, NamedTuple

from cachepipe.domain.kms_log import claim
from cachepipe.errors import TrustError, UsageError

ALGORITHM = "ECDSA_SHA_256"
WOULD_SIGN = "DryRunOperationException"
_DIGEST = "cachepipe.digest"
"""Where a call's own context keeps what it signs, from its parameters to its headers: calls of other threads have their own."""


class PublicKey(NamedTuple):
    arn: str
    der: bytes


class KmsKey:
    """One key, by its id, ARN or alias.

    Args:
        key_id: `alias/…`, an id or an ARN.
        client: boto3's `kms` client; None: one of the environment's credentials, in the region of the ARN, of AWS_REGION, or of boto3.
    """

    def __init__(self, key_id: str, client: Any = None) -> None:
        self.key_id = key_id
        self._client = client if client is not None else _client(key_id)
        events = self._client.meta.events
        # by its id a handler is registered once, however many keys share a client
        events.register("provide-client-params.kms.Sign", _keep_digest, unique_id="cachepipe-keep-digest")
        # last and of all requests, as botocore's own handler, which writes the header anew and would else come after it
        events.register_last("request-created.kms", _name_digest, unique_id="cachepipe-name-digest")

    def public_key(self) -> PublicKey | None:
        """Returns the public key and whose it is; None: there is no such key.

        Raises:
            TrustError: KMS refuses, cannot be reached, or the key cannot sign as we do.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = self._client.get_public_key(KeyId=self.key_id)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NotFoundException":
                return None
            raise self._failed("public key", error) from error
        except BotoCoreError as error:
            raise self._failed("public key", error) from error
        if ALGORITHM not in answer.get("SigningAlgorithms", ()):
            raise TrustError(
                f"KMS key {self.key_id}: cannot sign with {ALGORITHM}", hint="use a key of the kind ECC_NIST_P256"
            )
        return PublicKey(answer["KeyId"], answer["PublicKey"])

    def create(self) -> None:
        """Makes the key and, where `key_id` is one, its alias.

        Raises:
            TrustError: `key_id` is no alias, or KMS refuses.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        if not self.key_id.startswith("alias/"):
            raise TrustError(
                f"there is no KMS key {self.key_id}", hint="name an alias, `kms:alias/…`, to have one made"
            )
        try:
            made = self._client.create_key(KeySpec="ECC_NIST_P256", KeyUsage="SIGN_VERIFY", Description="cachepipe")
            self._client.create_alias(AliasName=self.key_id, TargetKeyId=made["KeyMetadata"]["KeyId"])
        except (ClientError, BotoCoreError) as error:
            raise self._failed("creation", error) from error

    def sign(self, message: bytes) -> bytes:
        """Returns the ECDSA signature of a message, DER.

        Raises:
            TrustError: KMS refuses or cannot be reached.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = self._client.sign(**self._request(message))
        except (ClientError, BotoCoreError) as error:
            raise self._failed("signature", error) from error
        signature = answer["Signature"]
        assert isinstance(signature, bytes)
        return signature

    def rehearse(self, message: bytes) -> None:
        """Returns when KMS would sign a message now; nothing is signed, so nothing is in the log that no store has.

        Raises:
            TrustError: KMS would refuse, or cannot be reached.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.sign(**self._request(message), DryRun=True)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != WOULD_SIGN:
                raise self._failed("signature", error) from error
        except BotoCoreError as error:
            raise self._failed("signature", error) from error

    def _request(self, message: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(message).digest()
        return {"KeyId": self.key_id, "Message": digest, "MessageType": "DIGEST", "SigningAlgorithm": ALGORITHM}

    def _failed(self, what: str, error: Exception) -> TrustError:
        return TrustError(
            f"KMS key {self.key_id}: no {what}: {error}",
            hint="check region, credentials and the key's policy: kms:GetPublicKey and kms:Sign are needed",
        )


def _keep_digest(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    if params.get("MessageType") == "DIGEST":
        context[_DIGEST] = bytes(params["Message"]).hex()


def _name_digest(request: Any, **_: Any) -> None:
    """Adds the digest to a request's User-Agent, which botocore leaves out of what it signs (SigV4)."""
    digest = request.context.get(_DIGEST)
    if digest:
        request.headers.replace_header("User-Agent", f"{request.headers['User-Agent']} {claim(digest)}")


def _region(key_id: str) -> str | None:
    """Returns the region of a key; None: boto3 knows it. boto3 1.44 reads no AWS_REGION."""
    named = key_id.split(":")[3:4] if key_id.startswith("arn:") else []
    return "".join(named) or os.environ.get("AWS_REGION") or None


def _client(key_id: str) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        config = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 4, "mode": "standard"})
        return boto3.client("kms", region_name=_region(key_id), config=config)
    except BotoCoreError as error:
        raise UsageError(f"no KMS client: {error}", hint="set AWS_REGION and credentials") from error
