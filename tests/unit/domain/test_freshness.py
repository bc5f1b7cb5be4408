"""The borders of an index's life, in seconds; the attacks are in tests/hostile/test_trust_attacks.py."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from cachepipe.domain.freshness import LONGEST_LIFE, check_floor, check_fresh, expiry
from cachepipe.domain.index import FORMAT, Index, timestamp
from cachepipe.domain.policy import ChannelRule
from cachepipe.domain.trust import TOLERANCE
from cachepipe.errors import TrustError
from tests.support.authority import policy

NOW = datetime(2026, 12, 1, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)
POLICY = policy()


def index(created: datetime, life: timedelta, version: int = 5) -> Index:
    return Index(FORMAT, "demo", "stable", version, timestamp(created), timestamp(created + life), "nonce", ())


def test_the_longest_life_is_allowed_and_a_second_more_is_not() -> None:
    check_fresh(index(NOW, LONGEST_LIFE), POLICY, NOW)
    with pytest.raises(TrustError, match="lives longer than 30 days"):
        check_fresh(index(NOW, LONGEST_LIFE + SECOND), POLICY, NOW)


@pytest.mark.parametrize("age_s", [None, 3600])
def test_an_index_is_used_until_its_last_second_by_its_own_word_or_the_policys(age_s: int | None) -> None:
    life = timedelta(hours=1) if age_s else timedelta(hours=2)
    rules = policy(channels={"stable": ChannelRule(1, age_s)})
    found = index(NOW, timedelta(hours=2))
    assert expiry(found, rules) == NOW + life
    check_fresh(found, rules, NOW + life + TOLERANCE)
    with pytest.raises(TrustError, match="the index has expired: demo@stable:5"):
        check_fresh(found, rules, NOW + life + TOLERANCE + SECOND)


def test_a_clock_that_is_behind_by_what_is_tolerated_is_no_future() -> None:
    check_fresh(index(NOW + TOLERANCE, LONGEST_LIFE), POLICY, NOW)
    with pytest.raises(TrustError, match="from the future"):
        check_fresh(index(NOW + TOLERANCE + SECOND, LONGEST_LIFE), POLICY, NOW)


def test_the_floor_itself_is_allowed_and_only_a_kept_one_can_be_removed() -> None:
    check_floor("demo@stable:5", 5, 5, "the trust policy wants")
    with pytest.raises(TrustError, match="demo@stable:4, the trust policy wants 5 or later") as caught:
        check_floor("demo@stable:4", 4, 5, "the trust policy wants")
    assert "remove" not in caught.value.hint
    with pytest.raises(TrustError) as caught:
        check_floor("demo@stable:4", 4, 5, "this machine saw", kept="/var/lib/floor")
    assert "remove /var/lib/floor" in caught.value.hint
