"""Whether an index may be used now: not below the floor, not expired, not from the future.

A store that hides newer versions (freeze) or plays back older ones (rollback) is noticed by these alone, so the messages
say which number refused. A lock file needs none of them.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from cachepipe.domain.index import Index, parse_timestamp, timestamp
from cachepipe.domain.policy import Policy
from cachepipe.domain.trust import TOLERANCE
from cachepipe.errors import TrustError

LONGEST_LIFE = timedelta(days=30)
"""An index that claims to live longer is refused: it could be played back for as long."""


def check_fresh(index: Index, policy: Policy, now: datetime) -> None:
    """Returns if the index may be used.

    Raises:
        TrustError: below the policy's version, expired by its own time or the policy's, living too long, or from the future.
    """
    label = f"{index.name}@{index.channel}:{index.version}"
    check_floor(label, index.version, policy.minimum_index_version(index.name, index.channel), "the trust policy wants")
    created, ends = parse_timestamp(index.created_at, "index"), parse_timestamp(index.expires_at, "index")
    if ends - created > LONGEST_LIFE:
        raise TrustError(f"the index lives longer than {LONGEST_LIFE.days} days: {label}, {created} to {ends}")
    if now - TOLERANCE > expiry(index, policy):
        raise TrustError(
            f"the index has expired: {label} at {timestamp(expiry(index, policy))}",
            hint="give it a fresh date with `cachepipe renew`; if that is done every week, "
            "someone hides newer versions or the clock is wrong",
        )
    if created > now + TOLERANCE:
        raise TrustError(
            f"the index is from the future: {label} of {index.created_at}, here it is {timestamp(now)}",
            hint="set this machine's clock, or the publisher's",
        )


def check_floor(label: str, version: int, minimum: int, whose: str, kept: str = "") -> None:
    """Returns if an index is of this version or a later one.

    Args:
        label: of the index.
        version: its own.
        minimum: that is allowed.
        whose: who wants it, for the error.
        kept: file that holds the minimum; empty: a policy does.

    Raises:
        TrustError: it is older; both numbers are named.
    """
    if version < minimum:
        hint = "an older version was played back, or the store was made anew: look who can write it"
        if kept:
            hint += f"; if it was made anew, or another store is meant now, remove {kept}"
        raise TrustError(f"the index is older than allowed: {label}, {whose} {minimum} or later", hint=hint)


def expiry(index: Index, policy: Policy) -> datetime:
    """Returns when the index expires, by its own word or by the policy's, whichever is earlier."""
    created, ends = parse_timestamp(index.created_at, "index"), parse_timestamp(index.expires_at, "index")
    age = timedelta(seconds=policy.maximum_age_s(index))
    return created + age if ends - created > age else ends  # the sum may lie beyond the last year that there is
