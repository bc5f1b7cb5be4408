"""The trust under which one command uses a store: whose signatures count, and who signs.

a policy file       its keys count; who signs is named by `--statement-key` and `--index-key`
none, file://       development keys beside the store, and the public halves of the keys that are named
none, elsewhere     the keys that are named; nothing is read without any (a lock file pins what it names)
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from cachepipe.adapters.dev_keys import adopt_keys, dev_key, dev_policy
from cachepipe.adapters.policy_file import DEFAULT_POLICY, read_policy_file
from cachepipe.adapters.store import TrustChoice
from cachepipe.domain import policy as policies
from cachepipe.domain import trust
from cachepipe.domain.policy import DEV_PREFIX, INDEX, NO_KEYS, STATEMENT, Key, Policy
from cachepipe.errors import TrustError

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

TRIAL = b"a trial of the key: neither a statement nor an index"
"""What a rehearsal has signed: no reader would parse it."""


class StoreTrust:
    """See the module's docstring; nothing is read before it is asked for.

    Args:
        choice: of the command line.
        root: the folder of a `file://` store; empty for others.
        url: of the store, for messages.
        now: time at which keys must not have ended; None: the time of the first question.
    """

    def __init__(self, choice: TrustChoice, root: str, url: str, now: datetime | None = None) -> None:
        self.choice = choice
        self.notes: list[str] = []
        """What the user must hear once: development keys were made or used."""
        self._root, self._url, self._now = root, url, now
        self._policy: Policy | None = None
        self._has_file = False
        self._signers: dict[str, list[Signer]] = {}

    @property
    def policy(self) -> Policy:
        """Whose signatures count.

        Raises:
            TrustError: the policy file cannot be used, or does not allow `--insecure-unsigned`; a development key is not safe.
        """
        if self._policy is None:
            self._policy = self._read_policy()
        return self._policy

    @property
    def has_policy_file(self) -> bool:
        return bool(self.policy) and self._has_file

    def verify(self, envelope: bytes, payload_type: str, what: str, is_pinned: bool = False) -> trust.Verified:
        """Returns the payload of an envelope that this trust accepts.

        Args:
            envelope: the whole text.
            payload_type: the one that is asked for.
            what: the object's name, for messages.
            is_pinned: a lock file names these very bytes by digest, and the caller compared it.

        Raises:
            IntegrityError, TrustError: as `domain.trust.verify`.
        """
        policy = self.policy
        now = None if is_pinned else self._clock()
        if self.choice.accepts_unsigned:
            return trust.accept_unsigned(envelope, payload_type, what, policy, now)
        if not policy.keys and not self._has_file:
            if is_pinned:
                return trust.accept_pinned(envelope, payload_type, what)
            raise self._nobody(envelope, payload_type, what)
        return trust.verify(envelope, payload_type, what, policy, now)

    def can_sign(self, role: str) -> bool:
        """Tells whether there is a key for a role; where keys were named, no development key stands in for the others."""
        return bool(self._address(role)) or self._is_dev()

    def seal(self, payload: bytes, payload_type: str) -> bytes:
        """Returns the signed envelope of a payload, which readers with the same policy accept: nothing else is ever written.

        Raises:
            UsageError, TrustError: there is no key for it, it cannot be used, or the policy does not let it sign this.
        """
        from cachepipe.adapters import signer

        role = trust.ROLE_OF_TYPE[payload_type]
        envelope = signer.seal(payload, payload_type, self._open_signers(role))
        trust.verify(envelope, payload_type, f"the {role} that was to be published", self.policy, self._clock())
        return envelope

    def rehearse(self, payload_type: str) -> None:
        """Fails as `seal` would; no key in KMS signs anything by it.

        Raises:
            UsageError, TrustError: as `seal`.
        """
        from cachepipe.adapters import signer

        role = trust.ROLE_OF_TYPE[payload_type]
        keyids = signer.rehearse(TRIAL, payload_type, self._open_signers(role))
        trust.check_signers(keyids, role, f"the {role} that was to be published", self.policy, self._clock())

    def adopt(self, other: StoreTrust) -> None:
        """Has this store believe the development keys of another, whose objects are copied here; with a policy file nothing is to do.

        Raises:
            TrustError: as `adopt_keys`.
        """
        if self._root and other._root and not self.has_policy_file:
            adopt_keys(other._root, self._root)
            self._policy = None

    def _clock(self) -> datetime:
        return self._now or datetime.now(timezone.utc)

    def _address(self, role: str) -> str:
        return self.choice.statement_key if role == STATEMENT else self.choice.index_key

    def _is_dev(self) -> bool:
        return bool(self._root) and not self.choice.statement_key and not self.choice.index_key

    def _open_signers(self, role: str) -> list[Signer]:
        if role not in self._signers:
            from cachepipe.adapters import signer

            if self._address(role):
                self._signers[role] = [signer.open_signer(part) for part in self._address(role).split(",")]
            elif self._is_dev():
                path, is_new = dev_key(self._root, signer.generate)
                self._policy = None if is_new else self._policy
                self._signers[role] = [signer.open_signer(f"file:{path}", prefix=DEV_PREFIX)]
                note = f"signed with the development key of this store ({path}): for trials, not for production"
                self.notes += [] if note in self.notes else [note]
            else:
                raise TrustError(
                    f"there is no key to sign the {role} with: {self._url}",
                    hint=f"name it: `--{role}-key file:PATH` or `--{role}-key kms:alias/…`; `cachepipe keygen` makes one",
                )
        return self._signers[role]

    def _read_policy(self) -> Policy:
        data = read_policy_file(self.choice.policy_file)
        if data is not None:
            if self.choice.accepts_unsigned:
                raise TrustError(
                    "`--insecure-unsigned` is refused where there is a trust policy",
                    hint="leave it out; what this image accepts is said by its policy alone",
                )
            self._has_file = True
            place = self.choice.policy_file or DEFAULT_POLICY
            return trust.check_keys(policies.read_policy(data, f"trust policy {place}"))
        base = dev_policy(self._root) if self._root else NO_KEYS
        own: dict[str, Key] = {}
        for role in (STATEMENT, INDEX):
            for signer in self._open_signers(role) if self._address(role) else ():
                keyid, public = signer.public_key.keyid, signer.public_key.to_dict()["keyval"]["public"]
                roles = own[keyid].roles if keyid in own else ()
                own[keyid] = Key(keyid, public, (*roles, role))
        return trust.check_keys(replace(base, keys=(*base.keys, *own.values())))

    def _nobody(self, envelope: bytes, payload_type: str, what: str) -> TrustError:
        trust.accept_pinned(envelope, payload_type, what)  # says so if it is not signed at all
        hint = (
            "name the trust policy: `--trust FILE`, CACHEPIPE_TRUST or /etc/cachepipe/trust.json; or pin by a lock file"
        )
        return TrustError(f"{what}: no trust policy says whose signatures count", hint=hint)
