"""Attacks on signatures and names by someone who can write the store (T-TUF, T-KEY): rollback, freeze, mix-and-match, keys.

Each goes through the loader's own steps with a policy as an image has it. The attacker has every object ever published, and
keys of their own; not the keys `s` (statements) and `i` (indexes).
"""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path

import pytest

from cachepipe.adapters.store import TrustChoice
from cachepipe.domain import trust
from cachepipe.domain.index import PAYLOAD_TYPE, first_index, index_bytes
from cachepipe.domain.layout import hint_key, index_key, statement_key
from cachepipe.domain.policy import ChannelRule
from cachepipe.domain.record import canonical_bytes
from cachepipe.domain.statement import statement_bytes
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE
from cachepipe.errors import CachepipeError, IntegrityError, MissError, TrustError
from cachepipe.workflows.channels import promote, renew, revoke
from cachepipe.workflows.fetch import read_artifact, read_channel, row_of
from tests.support import authority
from tests.support.artifacts import NOW, make_artifact
from tests.support.authority import key, policy
from tests.support.world import World

DAY = timedelta(days=1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def refused(world: World, message: str, kind: type[CachepipeError] = TrustError, **how: object) -> None:
    with pytest.raises(kind) as caught:
        world.restored(**how)  # type: ignore[arg-type]
    assert message in str(caught.value), str(caught.value)
    assert caught.value.hint


# --- what is published is restored ---------------------------------------------------------------------------------------


def test_what_the_publisher_signed_is_restored(world: World) -> None:
    row = world.publish()
    found = world.restored()
    assert (found.digest, found.status) == (row.statement, "signed")


# --- arbitrary content ---------------------------------------------------------------------------------------------------


def test_case_j1_an_unsigned_index_is_refused(world: World) -> None:
    row = world.publish()
    world.put_raw_index(
        2, trust.seal(index_bytes(dataclasses.replace(world.index(1), version=2, rows=(row,))), PAYLOAD_TYPE)
    )
    refused(world, "index demo@stable:2: unsigned")


def test_case_j1_an_unsigned_statement_is_refused_although_a_signed_index_names_it(world: World) -> None:
    packed = make_artifact(world.folder, 9)
    envelope = trust.seal(statement_bytes(packed.statement), STATEMENT_PAYLOAD_TYPE)
    world.publish()
    world.store.objects[statement_key(packed.statement.artifact)] = envelope
    world.put_index(2, (row_of(packed.statement, envelope),))
    refused(world, "unsigned")


def test_an_index_signed_by_a_strangers_key_is_refused(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), "stranger")
    refused(world, "by a key that the policy does not list")


def test_a_statement_signed_by_a_strangers_key_is_refused(world: World) -> None:
    world.publish()
    row = world.put_statement(make_artifact(world.folder, 9).statement, "stranger")
    world.put_index(2, (row,))
    refused(world, "0 of 1 statement signatures count")


def test_a_strangers_signature_under_a_trusted_keys_id_is_refused(world: World) -> None:
    row = world.publish()
    tree = json.loads(world.put_index(2, (row,), "stranger"))
    tree["signatures"][0]["keyid"] = key("i").keyid
    world.put_raw_index(2, canonical_bytes(tree))
    refused(world, "is not of these bytes")


def test_a_changed_payload_under_the_old_signature_is_refused(world: World) -> None:
    world.publish()
    envelope = trust.open_envelope(world.store.objects[index_key("demo", "stable", 1)], PAYLOAD_TYPE, "x")
    other = envelope.payload.replace(b'"version":1', b'"version":2')
    world.put_raw_index(2, trust.seal(other, PAYLOAD_TYPE, envelope.signatures))
    refused(world, "is not of these bytes")


def test_a_signature_over_the_payload_without_its_type_is_refused(world: World) -> None:
    row = world.publish()
    payload = index_bytes(dataclasses.replace(world.index(1), version=2, rows=(row,)))
    raw = authority._signer("i", "").sign(payload)
    world.put_raw_index(
        2, trust.seal(payload, PAYLOAD_TYPE, [trust.Signature(raw.keyid, bytes.fromhex(raw.signature))])
    )
    refused(world, "is not of these bytes")


def test_an_empty_signature_is_refused(world: World) -> None:
    row = world.publish()
    payload = index_bytes(dataclasses.replace(world.index(1), version=2, rows=(row,)))
    world.put_raw_index(2, trust.seal(payload, PAYLOAD_TYPE, [trust.Signature(key("i").keyid, b"")]))
    refused(world, "is not of these bytes")


@pytest.mark.parametrize("sig", [bytes(8), b"\x30\x06\x02\x01\x00\x02\x01\x00", b"\x30\x06\x02\x01\x01\x02\x01\x01"])
def test_a_signature_of_zeros_and_ones_is_refused(world: World, sig: bytes) -> None:
    row = world.publish()
    payload = index_bytes(dataclasses.replace(world.index(1), version=2, rows=(row,)))
    world.put_raw_index(2, trust.seal(payload, PAYLOAD_TYPE, [trust.Signature(key("i").keyid, sig)]))
    refused(world, "is not of these bytes")


def test_a_key_inside_the_message_is_not_believed(world: World) -> None:
    row = world.publish()
    tree = json.loads(world.put_index(2, (row,), "stranger"))
    tree["signatures"][0]["public"] = key("stranger").public
    world.put_raw_index(2, canonical_bytes(tree))
    refused(world, "a signature is not `keyid` with `sig`", IntegrityError)


def test_an_algorithm_inside_the_message_is_not_believed(world: World) -> None:
    row = world.publish()
    tree = json.loads(world.put_index(2, (row,), "stranger"))
    tree["signatures"][0]["alg"] = "none"
    world.put_raw_index(2, canonical_bytes(tree))
    refused(world, "a signature is not `keyid` with `sig`", IntegrityError)


# --- roles ---------------------------------------------------------------------------------------------------------------


def test_the_statement_key_cannot_sign_an_index(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), "s")
    refused(world, "may not sign as index")


def test_the_index_key_cannot_sign_a_statement(world: World) -> None:
    world.publish()
    row = world.put_statement(make_artifact(world.folder, 9).statement, "i")
    world.put_index(2, (row,))
    refused(world, "may not sign as statement")


def test_a_signed_statement_in_the_place_of_an_index_is_refused(world: World) -> None:
    row = world.publish()
    world.put_raw_index(2, world.store.objects[statement_key(row.artifact)])
    refused(world, "payload type")


def test_a_signed_index_in_the_place_of_a_statement_is_refused(world: World) -> None:
    row = world.publish()
    world.store.objects[statement_key(row.artifact)] = world.store.objects[index_key("demo", "stable", 1)]
    refused(world, "payload type")


def test_an_index_with_the_payload_type_of_a_statement_is_refused(world: World) -> None:
    row = world.publish()
    payload = index_bytes(dataclasses.replace(world.index(1), version=2, rows=(row,)))
    world.put_raw_index(2, authority.sealed(payload, STATEMENT_PAYLOAD_TYPE, "i", "s"))
    refused(world, "payload type")


# --- rollback ------------------------------------------------------------------------------------------------------------


def test_rollback_below_the_policys_floor_is_refused_with_both_numbers(world: World) -> None:
    for _ in range(3):
        world.publish()
    world.forget_above(1)
    floor = policy(channels={"stable": ChannelRule(minimum_index_version=3)})
    refused(world, "demo@stable:1, the trust policy wants 3 or later", policy=floor)


def test_rollback_below_the_floor_of_this_release_alone_is_refused(world: World) -> None:
    for _ in range(3):
        world.publish()
    world.forget_above(2)
    floor = policy(channels={"demo@stable": ChannelRule(3), "stable": ChannelRule(1)})
    refused(world, "wants 3 or later", policy=floor)


def test_a_version_at_the_floor_is_used(world: World) -> None:
    for _ in range(3):
        world.publish()
    assert world.restored(policy(channels={"stable": ChannelRule(3)}))


def test_an_old_index_under_a_new_number_is_refused(world: World) -> None:
    world.publish()
    world.publish()
    world.put_raw_index(3, world.store.objects[index_key("demo", "stable", 1)])
    refused(world, "not the one asked for", IntegrityError)


def test_an_old_index_in_the_place_of_the_newest_is_refused(world: World) -> None:
    world.publish()
    world.publish()
    world.put_raw_index(2, world.store.objects[index_key("demo", "stable", 1)])
    refused(world, "not the one asked for", IntegrityError)


def test_a_hint_that_points_back_gives_the_newest_version(world: World) -> None:
    rows = [world.publish() for _ in range(3)]
    world.store.objects[hint_key("demo", "stable")] = b"1\n"
    assert world.restored().digest == rows[-1].statement


def test_a_hint_that_points_far_ahead_gives_the_newest_version(world: World) -> None:
    rows = [world.publish() for _ in range(3)]
    world.store.objects[hint_key("demo", "stable")] = b"999999\n"
    assert world.restored().digest == rows[-1].statement


def test_an_old_statement_in_the_place_of_a_new_one_is_refused(world: World) -> None:
    old, new = world.publish(), world.publish()
    world.store.objects[statement_key(new.artifact)] = world.store.objects[statement_key(old.artifact)]
    refused(world, "another artifact", IntegrityError)


def test_with_a_lock_a_rolled_back_index_changes_nothing(world: World) -> None:
    world.publish()
    row = world.publish()
    world.forget_above(1)
    assert world.pinned(row).digest == row.statement


# --- freeze, clocks ------------------------------------------------------------------------------------------------------


def test_a_frozen_channel_is_noticed_when_its_index_expires(world: World) -> None:
    world.publish()
    world.publish(now=NOW + 10 * DAY)
    world.forget_above(1)
    world.restored(now=NOW + 14 * DAY)
    refused(world, "expired: demo@stable:1", now=NOW + 15 * DAY)


def test_a_policy_can_end_a_channel_earlier(world: World) -> None:
    world.publish()
    short = policy(channels={"stable": ChannelRule(maximum_age_s=3600)})
    assert world.restored(short, now=NOW + timedelta(seconds=3900))
    refused(world, "expired", policy=short, now=NOW + timedelta(seconds=3901))


def test_a_policy_cannot_lengthen_a_channels_life(world: World) -> None:
    world.publish()
    refused(world, "expired", policy=policy(channels={"stable": ChannelRule(maximum_age_s=10**9)}), now=NOW + 15 * DAY)


def test_an_index_that_claims_to_live_for_years_is_refused(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), expires_at="2036-11-30T10:00:00Z")
    refused(world, "lives longer than 30 days")


def test_an_index_from_the_future_says_that_a_clock_is_wrong(world: World) -> None:
    world.publish()
    assert world.restored(now=NOW - timedelta(seconds=300))
    refused(world, "from the future", now=NOW - timedelta(seconds=301))


def test_a_clock_of_1970_refuses_the_channel_and_not_the_lock(world: World) -> None:
    row = world.publish()
    epoch = NOW.replace(year=1970)
    refused(world, "from the future", now=epoch)
    assert world.pinned(row, now=epoch).digest == row.statement


def test_a_renewed_channel_lives_on(world: World) -> None:
    row = world.publish()
    renew(world.store, "demo", "stable", NOW + 10 * DAY)
    assert world.restored(now=NOW + 20 * DAY).digest == row.statement


def test_an_index_that_ends_before_it_began_is_refused(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), expires_at="2026-11-01T00:00:00Z")
    refused(world, "expired")


@pytest.mark.parametrize("field", ["created_at", "expires_at"])
def test_an_index_whose_times_are_none_is_refused(world: World, field: str) -> None:
    row = world.publish()
    world.put_index(2, (row,), **{field: "never"})
    refused(world, "not a time", IntegrityError)


# --- fast-forward ---------------------------------------------------------------------------------------------------------


def test_a_strangers_huge_version_does_not_end_the_channel_for_publishers(world: World) -> None:
    row = world.publish()
    world.put_index(2**40, (row,), "stranger")
    assert world.restored().digest == row.statement
    assert world.publish().statement == world.restored().digest


def test_a_planted_next_version_is_refused_and_the_publisher_does_not_build_on_it(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), "stranger")
    refused(world, "by a key that the policy does not list")
    with pytest.raises(TrustError):
        world.publish()


# --- mix-and-match --------------------------------------------------------------------------------------------------------


def test_the_index_of_another_release_is_refused(world: World) -> None:
    world.publish()
    world.publish(release="other")
    world.put_raw_index(1, world.store.objects[index_key("other", "stable", 1)])
    refused(world, "not the one asked for", IntegrityError)


def test_the_index_of_another_channel_is_refused(world: World) -> None:
    world.publish()
    world.publish(channel="candidate")
    world.put_raw_index(1, world.store.objects[index_key("demo", "candidate", 1)])
    refused(world, "not the one asked for", IntegrityError)


def test_the_statement_of_another_release_is_refused_although_signed(world: World) -> None:
    world.publish()
    row = world.publish(release="other")
    world.put_index(2, (row,))
    refused(world, "another release", IntegrityError)


def test_a_row_that_lies_about_its_fingerprint_is_refused(world: World) -> None:
    row = world.publish()
    world.put_index(2, (dataclasses.replace(row, packs_bytes=row.packs_bytes + 1),))
    refused(world, "the row that names it says something else", IntegrityError)


def test_a_statement_for_another_machine_under_a_row_for_this_one_is_refused(world: World) -> None:
    row = world.publish()
    foreign = dataclasses.replace(make_artifact(world.folder, 8).statement, fingerprint=())
    other = world.put_statement(foreign, "s")
    world.put_index(2, (dataclasses.replace(other, fingerprint=row.fingerprint),))
    refused(world, "the row that names it says something else", IntegrityError)


def test_a_lock_refuses_another_statement_of_the_same_artifact(world: World) -> None:
    row = world.publish()
    statement = make_artifact(world.folder, 50).statement
    world.put_statement(dataclasses.replace(statement, artifact=row.artifact), "s")
    with pytest.raises(IntegrityError, match="SHA-256"):
        world.pinned(row)


def test_a_lock_for_one_release_does_not_give_another(world: World) -> None:
    row = world.publish(release="other")
    with pytest.raises(IntegrityError, match="another release"):
        world.pinned(row)


# --- thresholds -----------------------------------------------------------------------------------------------------------

TWO = policy(
    key("s", "statement"), key("s2", "statement"), key("i", "index"), key("i2", "index"), thresholds={"index": 2}
)


def test_one_signature_of_two_is_refused(world: World) -> None:
    world.publish()
    refused(world, "1 of 2 index signatures count", policy=TWO)


def test_two_signatures_of_two_are_enough(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), "i", "i2")
    assert world.restored(TWO).status == "signed"


def test_the_same_signature_twice_counts_once(world: World) -> None:
    row = world.publish()
    tree = json.loads(world.put_index(2, (row,), "i"))
    tree["signatures"] *= 2
    world.put_raw_index(2, canonical_bytes(tree))
    refused(world, "a key signed twice", IntegrityError, policy=TWO)


def test_two_signatures_of_one_key_under_two_ids_count_once(world: World) -> None:
    row = world.publish()
    tree = json.loads(world.put_index(2, (row,), "i"))
    tree["signatures"] = sorted(
        [tree["signatures"][0], {**tree["signatures"][0], "keyid": key("i2").keyid}], key=lambda item: item["keyid"]
    )
    world.put_raw_index(2, canonical_bytes(tree))
    refused(world, "is not of these bytes", policy=TWO)


def test_a_strangers_signature_does_not_complete_a_threshold(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), "i", "stranger")
    refused(world, "1 of 2 index signatures count; by a key that the policy does not list", policy=TWO)


def test_a_signature_of_another_role_does_not_complete_a_threshold(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), "i", "s")
    refused(world, "1 of 2 index signatures count", policy=TWO)


def test_more_signatures_than_the_limit_are_refused(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), *(f"stranger{number}" for number in range(9)))
    refused(world, "too many signatures", IntegrityError)


# --- keys: rotation, ends, development -----------------------------------------------------------------------------------

BOTH = policy(key("s", "statement"), key("i", "index"), key("s2", "statement"), key("i2", "index"))
NEW = policy(key("s2", "statement"), key("i2", "index"))


def test_rotation_images_with_both_keys_take_old_and_new(world: World) -> None:
    old = world.publish()
    assert world.restored(BOTH).digest == old.statement
    row = world.put_statement(make_artifact(world.folder, 9).statement, "s2")
    world.put_index(2, (row,), "i2")
    assert world.restored(BOTH).digest == row.statement


def test_rotation_images_without_the_old_key_refuse_it(world: World) -> None:
    world.publish()
    refused(world, "by a key that the policy does not list", policy=NEW)


def test_rotation_images_without_the_new_key_refuse_it(world: World) -> None:
    row = world.publish()
    world.put_index(2, (row,), "i2")
    refused(world, "by a key that the policy does not list")


def test_rotation_an_index_signed_by_both_suits_old_and_new_images(world: World) -> None:
    world.publish()
    row = world.put_statement(make_artifact(world.folder, 9).statement, "s", "s2")
    world.put_index(2, (row,), "i", "i2")
    assert world.restored().digest == world.restored(NEW).digest == row.statement


def test_a_key_that_has_ended_counts_no_more(world: World) -> None:
    world.publish()
    ending = policy(key("s", "statement"), key("i", "index", not_after="2026-12-01T00:00:00Z"))
    end = NOW.replace(month=12, day=1, hour=0)
    assert world.restored(ending, now=NOW)
    assert world.restored(ending, now=end + timedelta(seconds=300))  # clocks may differ by five minutes
    refused(world, "ended at 2026-12-01", policy=ending, now=end + timedelta(seconds=301))
    refused(world, "ended at 2026-12-01", policy=ending, now=NOW + 2 * DAY)


def test_a_statement_key_that_has_ended_counts_in_a_lock_alone(world: World) -> None:
    row = world.publish()
    ending = policy(key("s", "statement", not_after="2026-12-01T00:00:00Z"), key("i", "index"))
    refused(world, "ended at", policy=ending, now=NOW + 2 * DAY)
    assert world.pinned(row, ending, now=NOW + 2 * DAY).status == "signed"


def test_a_key_that_was_taken_out_of_the_policy_does_not_even_count_in_a_lock(world: World) -> None:
    row = world.publish()
    with pytest.raises(TrustError):
        world.pinned(row, NEW)


def dev_signed(world: World) -> None:
    packed = make_artifact(world.folder, 9)
    envelope = authority.sealed(statement_bytes(packed.statement), STATEMENT_PAYLOAD_TYPE, "d", prefix="dev-")
    world.store.objects[statement_key(packed.statement.artifact)] = envelope
    index = first_index("demo", "stable", (row_of(packed.statement, envelope),), NOW, "n")
    world.store.objects[index_key("demo", "stable", 1)] = authority.sealed(
        index_bytes(index), PAYLOAD_TYPE, "d", prefix="dev-"
    )


def test_a_development_key_is_refused_by_a_policy_that_does_not_list_it(world: World) -> None:
    world.publish(channel="candidate")
    dev_signed(world)
    refused(world, "by a development key that the policy does not list")


def test_a_development_key_counts_where_the_policy_lists_its_role(world: World) -> None:
    world.publish(channel="candidate")
    dev_signed(world)
    assert world.restored(policy(key("d", "dev"))).status == "development key"


def test_a_development_key_renamed_in_the_policy_is_another_key(world: World) -> None:
    world.publish(channel="candidate")
    dev_signed(world)
    refused(world, "development key", policy=policy(key("d", "statement", "index")))


# --- revocation -----------------------------------------------------------------------------------------------------------


def test_a_revoked_artifact_is_not_restored_from_its_channel(world: World) -> None:
    row = world.publish()
    revoke(world.store, "demo", "stable", row.artifact, NOW)
    with pytest.raises(MissError):
        world.restored()


def test_a_revoked_artifact_stays_revoked_when_its_row_comes_back(world: World) -> None:
    row = world.publish()
    revoke(world.store, "demo", "stable", row.artifact, NOW)
    world.put_index(3, (row,), revoked=(row.statement,))
    refused(world, f"revoked: demo: {row.artifact}")
    with pytest.raises(TrustError, match="revoked"):
        promote(world.store, "demo", "stable", "canary", row.artifact, NOW)


def test_a_digest_revoked_by_the_policy_is_refused_in_channel_and_lock(world: World) -> None:
    row = world.publish()
    without = policy(revoked=(row.statement,))
    refused(world, f"revoked: demo: {row.artifact}", policy=without)
    with pytest.raises(TrustError, match="revoked by the trust policy"):
        world.pinned(row, without)


def test_after_a_revocation_by_policy_the_next_best_artifact_is_used(world: World) -> None:
    old, new = world.publish(), world.publish()
    world.put_index(3, (old, new))
    assert world.restored(policy(revoked=(new.statement,))).digest == old.statement


# --- no policy, unsigned -------------------------------------------------------------------------------------------------


def test_without_a_policy_nothing_signed_is_believed_from_a_channel(world: World) -> None:
    world.publish()
    store = world.reader(choice=TrustChoice())
    with pytest.raises(TrustError, match="no trust policy") as caught:
        read_channel(store, "demo", "stable", NOW)
    assert "--trust" in caught.value.hint


def test_without_a_policy_a_lock_still_pins_what_it_names(world: World) -> None:
    row = world.publish()
    store = world.reader(choice=TrustChoice())
    assert read_artifact(store, row, "demo", is_pinned=True).status == "pinned by the lock file"
    with pytest.raises(TrustError):
        read_artifact(store, row, "demo")


def test_a_lock_does_not_make_up_for_a_missing_signature(world: World) -> None:
    packed = make_artifact(world.folder, 9)
    envelope = trust.seal(statement_bytes(packed.statement), STATEMENT_PAYLOAD_TYPE)
    world.store.objects[statement_key(packed.statement.artifact)] = envelope
    with pytest.raises(TrustError, match="unsigned"):
        read_artifact(world.reader(choice=TrustChoice()), row_of(packed.statement, envelope), "demo", is_pinned=True)


def test_case_j3_insecure_unsigned_is_refused_by_any_policy_file(world: World) -> None:
    world.publish()
    file = authority.write_policy(world.folder / "p.json")
    store = world.reader(choice=TrustChoice(policy_file=file, accepts_unsigned=True))
    with pytest.raises(TrustError, match="`--insecure-unsigned` is refused"):
        read_channel(store, "demo", "stable", NOW)


def test_insecure_unsigned_takes_unsigned_and_says_so(world: World) -> None:
    row = world.publish()
    store = world.reader(choice=TrustChoice(accepts_unsigned=True))
    assert read_channel(store, "demo", "stable", NOW).status == "unchecked signatures"
    payload = index_bytes(dataclasses.replace(world.index(1), version=2, rows=(row,)))
    world.put_raw_index(2, trust.seal(payload, PAYLOAD_TYPE))
    assert read_channel(store, "demo", "stable", NOW).status == "unsigned"
