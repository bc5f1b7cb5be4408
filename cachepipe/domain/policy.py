"""The trust policy of an image: which keys may sign what, how old a channel may be, which statements are revoked.

`trust.json`, written by `cachepipe keygen --policy`, kept in git, baked into images at `/etc/cachepipe/trust.json`:

    {"channels": {"stable": {"maximum_age_s": 1209600, "minimum_index_version": 42}},
     "format": 1,
     "keys": [{"keyid": "<sha256>", "not_after": "2027-03-01T00:00:00Z", "public": "-----BEGIN PUBLIC KEY-----…",
               "roles": ["statement"], "scheme": "ecdsa-sha2-nistp256"}],
     "revoked": ["<statement digest>"],
     "thresholds": {"index": 1, "statement": 1}}

Unknown fields are refused, so that a misspelt rule cannot be no rule. A key's id is the SHA-256 of its public key (DER,
SubjectPublicKeyInfo); one of a development key is marked by `dev-` and may have the role `dev` alone, which stands for
every role. A rule for `name@channel` counts beside the one for `channel`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cachepipe.domain.index import Index, parse_timestamp
from cachepipe.domain.limits import LIMITS, Limits
from cachepipe.domain.record import is_digest, read_record, record_bytes
from cachepipe.errors import IntegrityError, TrustError

FORMAT = 1
STATEMENT, INDEX, DEV = "statement", "index", "dev"
ROLES = (STATEMENT, INDEX, DEV)
SCHEME = "ecdsa-sha2-nistp256"
"""The only one: KMS has it everywhere, and a message cannot choose another."""
DEV_PREFIX = "dev-"

_CHANNEL = re.compile(r"(?:[a-z0-9._-]{1,64}@)?[a-z0-9._-]{1,64}", re.ASCII)
_KEYID = re.compile(r"(?:dev-)?[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Key:
    keyid: str
    public: str
    """PEM, SubjectPublicKeyInfo."""
    roles: tuple[str, ...]
    scheme: str = SCHEME
    not_after: str = ""
    """RFC 3339 in UTC; empty: it does not end."""

    def has_role(self, role: str) -> bool:
        return role in self.roles or DEV in self.roles


@dataclass(frozen=True)
class ChannelRule:
    minimum_index_version: int = 1
    maximum_age_s: int | None = None
    """Seconds since `created_at` after which an index counts as expired, whatever it says itself."""


@dataclass(frozen=True)
class Policy:
    format: int
    keys: tuple[Key, ...]
    thresholds: Mapping[str, int] = field(default_factory=dict)
    """Role → how many different keys must have signed; 1 where it says nothing."""
    channels: Mapping[str, ChannelRule] = field(default_factory=dict)
    revoked: tuple[str, ...] = ()
    """Statement digests that are refused, lock file or not."""

    def threshold(self, role: str) -> int:
        return self.thresholds.get(role, 1)

    def rules(self, name: str, channel: str) -> tuple[ChannelRule, ...]:
        """Returns the rules for a channel of a release: all of them count."""
        return tuple(self.channels[key] for key in (channel, f"{name}@{channel}") if key in self.channels)

    def minimum_index_version(self, name: str, channel: str) -> int:
        return max([1, *(rule.minimum_index_version for rule in self.rules(name, channel))])

    def maximum_age_s(self, index: Index) -> float:
        """Returns after how many seconds an index counts as expired: what it says itself, or less."""
        own = parse_timestamp(index.expires_at, "index") - parse_timestamp(index.created_at, "index")
        ages = [rule.maximum_age_s for rule in self.rules(index.name, index.channel)]
        return min([own.total_seconds(), *(age for age in ages if age is not None)])


NO_KEYS = Policy(FORMAT, ())
"""Trusts nobody."""


def policy_bytes(policy: Policy) -> bytes:
    return record_bytes(policy)


def read_policy(data: bytes, what: str = "trust policy", limits: Limits = LIMITS) -> Policy:
    """Returns the policy in `data`, which people write: any spacing, every field checked.

    Raises:
        TrustError: not strict, of an unknown format, a field out of range; that a key is one is checked by `domain/trust.py`.
    """
    hint = "write it with `cachepipe keygen --policy`; the README's trust chapter lists every field"
    try:
        policy = read_record(Policy, data, what, limits.small_file_bytes)
    except IntegrityError as error:
        raise TrustError(str(error), hint=hint) from error
    problems = list(_problems(policy))
    if problems:
        raise TrustError(f"{what}: {'; '.join(problems)}", hint=hint)
    return policy


def _problems(policy: Policy) -> list[str]:
    found = [] if policy.format == FORMAT else [f"unknown format {policy.format}, this release reads {FORMAT}"]
    for key in policy.keys:
        found += [f"key {key.keyid[:80]!r}: {problem}" for problem in _key_problems(key)]
    if len({key.keyid.removeprefix(DEV_PREFIX) for key in policy.keys}) != len(policy.keys):
        found.append("a key is listed twice")
    for role, number in policy.thresholds.items():
        holders = sum(role in key.roles for key in policy.keys)
        if role not in (STATEMENT, INDEX):
            found.append(f"threshold of an unknown role {role[:80]!r}")
        elif not 1 <= number <= LIMITS.signatures or number > holders > 0:
            found.append(f"threshold of {role}: wanted 1..{min(holders, LIMITS.signatures) or 1}, found {number}")
    for channel, rule in policy.channels.items():
        if _CHANNEL.fullmatch(channel) is None:
            found.append(f"not a channel or name@channel: {channel[:80]!r}")
        if rule.minimum_index_version < 1 or (rule.maximum_age_s is not None and rule.maximum_age_s < 1):
            found.append(f"rule of {channel[:80]!r}: a number below 1")
    found += [f"revoked: not a statement digest: {text[:80]!r}" for text in policy.revoked if not is_digest(text)]
    return found


def _key_problems(key: Key) -> list[str]:
    is_dev = key.keyid.startswith(DEV_PREFIX)
    found = [] if _KEYID.fullmatch(key.keyid) else ["not a key id"]
    if key.scheme != SCHEME:
        found.append(f"scheme {key.scheme[:40]!r}, wanted {SCHEME}")
    if not key.roles or not set(key.roles) <= set(ROLES):
        found.append(f"roles: one or more of {', '.join(ROLES)}")
    elif is_dev != (DEV in key.roles) or (is_dev and key.roles != (DEV,)):
        found.append("a development key has the role dev alone, and no other key has it")
    if key.not_after:
        try:
            parse_timestamp(key.not_after, "not_after")
        except IntegrityError as error:
            found.append(str(error))
    return found
