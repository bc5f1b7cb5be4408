"""The trust's part of a checkup: whose signatures count here, until when, and what the channels are signed with."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from cachepipe.adapters.policy_file import DEFAULT_POLICY
from cachepipe.adapters.store_trust import StoreTrust
from cachepipe.domain.checkup import FAIL, NOTE, OK, WARN, Check
from cachepipe.domain.index import parse_timestamp
from cachepipe.domain.policy import INDEX, STATEMENT, Key, Policy
from cachepipe.domain.trust import DEVELOPMENT, SIGNED, UNSIGNED
from cachepipe.errors import CachepipeError
from cachepipe.workflows.fetch import Channel

SOON = timedelta(days=14)
"""A key that ends within it should be rotated now: new images have to be shipped first."""

_SIGNATURES = {
    SIGNED: (OK, ""),
    DEVELOPMENT: (WARN, "a development key: for trials; `cachepipe keygen` makes keys of your own"),
    UNSIGNED: (
        WARN,
        "whoever can write the store runs code in the service: sign, and bake a trust policy into the image",
    ),
}


def trust_checks(trust: StoreTrust, found: Sequence[Channel], now: datetime) -> list[Check]:
    """Returns the checks of the trust under which a store is used.

    Args:
        trust: with the choice of the command line.
        found: the store's channels, as they were read.
        now: at which keys must not have ended.
    """
    try:
        policy, has_file = trust.policy, trust.has_policy_file
    except CachepipeError as error:
        return [Check("trust", "policy", str(error), FAIL, error.hint)]
    place = trust.choice.policy_file or DEFAULT_POLICY
    rows = [_policy(policy, place if has_file else "")]
    if has_file:
        rows += [_role(policy, role, now) for role in (STATEMENT, INDEX)]
        rows += [_end(key, now) for key in policy.keys if key.not_after]
    for status in sorted({one.status for one in found}):
        verdict, advice = _SIGNATURES.get(status, (NOTE, ""))
        rows.append(Check("trust", "signatures", status, verdict, advice))
    return rows


def _policy(policy: Policy, place: str) -> Check:
    if place:
        revoked = f", {len(policy.revoked)} revoked statements" if policy.revoked else ""
        return Check("trust", "policy", f"{place}: {len(policy.keys)} keys{revoked}")
    if policy.keys:
        return Check("trust", "policy", "none: the store's own development keys count", NOTE, "for trials alone")
    return Check("trust", "policy", "none: channels are refused, lock files count", WARN, "name one: `--trust FILE`")


def _role(policy: Policy, role: str, now: datetime) -> Check:
    live = sum(key.has_role(role) and not _has_ended(key, now) for key in policy.keys)
    wanted = policy.threshold(role)
    text = f"{live} live keys, {wanted} wanted"
    if live >= wanted:
        return Check("trust", f"role {role}", text)
    return Check("trust", f"role {role}", text, FAIL, "nothing new is believed: `cachepipe keygen` one into the policy")


def _end(key: Key, now: datetime) -> Check:
    name = f"key {key.keyid[:12]}"
    if _has_ended(key, now):
        return Check("trust", name, f"ended {key.not_after}", NOTE, "it counts in lock files alone")
    left = parse_timestamp(key.not_after, "not_after") - now
    if left <= SOON:
        return Check("trust", name, f"ends {key.not_after}", WARN, "rotate it: a new key, new images, then the signers")
    return Check("trust", name, f"ends {key.not_after}")


def _has_ended(key: Key, now: datetime) -> bool:
    return bool(key.not_after) and parse_timestamp(key.not_after, "not_after") <= now
