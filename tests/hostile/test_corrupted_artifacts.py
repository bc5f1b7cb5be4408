"""1,000 corrupted artifacts (T-HOST): 20 families of corruption × 50 seeds, each through the loader's own steps.

Must hold for every one: refused by an error of ours, nothing written outside the target, nothing that could be used left
in it, within 2 seconds. What an attacker without keys can do is done to the published bytes; what only a bug of ours could
do is done to the content and signed again with the real keys.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from cachepipe.adapters.materialise import materialise
from cachepipe.adapters.packs import open_blob
from cachepipe.adapters.store import TrustChoice
from cachepipe.adapters.store_trust import StoreTrust
from cachepipe.domain.artifact import Blob
from cachepipe.domain.index import PAYLOAD_TYPE, Index, first_index, select
from cachepipe.domain.layout import hint_key, index_key, pack_key, statement_key
from cachepipe.domain.record import canonical_bytes, sha256
from cachepipe.domain.statement import Statement, read_statement
from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE, open_envelope, seal
from cachepipe.errors import CachepipeError, IntegrityError
from cachepipe.workflows.fetch import read_artifact, read_channel, read_file_table, row_of
from cachepipe.workflows.publish import publish
from tests.support import authority
from tests.support.artifacts import NOW, make_artifact
from tests.support.memory_store import MemoryStore
from tests.support.world import MACHINE

SEEDS = 50
MEMORY_LIMIT_KIB = 512 * 1024


@dataclass
class Victim:
    """A store as published, of which a corruption gets a copy to harm."""

    objects: dict[str, bytes]
    random: random.Random

    @property
    def index_key(self) -> str:
        return index_key("demo", "stable", 1)

    @property
    def statement_key(self) -> str:
        return next(key for key in self.objects if key.endswith("statement.dsse.json"))

    @property
    def statement(self) -> Statement:
        return read_statement(open_envelope(self.objects[self.statement_key], STATEMENT_PAYLOAD_TYPE, "x").payload)

    @property
    def index(self) -> Index:
        from cachepipe.domain.index import read_index

        return read_index(open_envelope(self.objects[self.index_key], PAYLOAD_TYPE, "x").payload, "demo", "stable", 1)

    def table(self) -> Any:
        statement = self.statement
        raw = zstandard.ZstdDecompressor().decompress(
            self.objects[pack_key(statement.artifact, statement.table.digest)]
        )
        return json.loads(raw)

    def pick(self, keys: list[str]) -> str:
        return self.random.choice(sorted(keys))

    def needed(self) -> list[str]:
        """Returns the objects that a restore must have: all but hint, format and explain data."""
        explain = self.statement.explain.digest
        return [key for key in self.objects if not key.endswith(("hint", "format.json", explain))]

    # --- what only we could sign -------------------------------------------------------------------------------------

    def put_blob(self, raw: bytes, **settings: Any) -> Blob:
        frame = zstandard.ZstdCompressor(level=3, write_checksum=True, **settings).compress(raw)
        blob = Blob(sha256(frame), len(frame), len(raw))
        self.objects[pack_key(self.statement.artifact, blob.digest)] = frame
        return blob

    def sign(self, payload: bytes) -> None:
        """Signs any statement payload with the real keys, and an index that names it."""
        envelope = authority.sealed(payload, STATEMENT_PAYLOAD_TYPE, "s")
        self.objects[self.statement_key] = envelope
        try:
            row = row_of(read_statement(payload), envelope)
        except CachepipeError:
            row = replace(self.index.rows[0], statement=sha256(envelope), size_bytes=len(envelope))
        self.objects[self.index_key] = authority.sealed_index(first_index("demo", "stable", (row,), NOW, "n"))

    def sign_statement(self, **changes: Any) -> None:
        from cachepipe.domain.statement import statement_bytes

        self.sign(statement_bytes(replace(self.statement, **changes)))

    def sign_table(self, table: Any, raw: bytes | None = None) -> None:
        data = canonical_bytes(table) if raw is None else raw
        self.sign_statement(table=self.put_blob(data), files=len(table["files"]))


def flip(victim: Victim, key: str) -> None:
    data = bytearray(victim.objects[key])
    data[victim.random.randrange(len(data))] ^= 1 << victim.random.randrange(8)
    victim.objects[key] = bytes(data)


def flipped_bit(victim: Victim) -> None:
    flip(victim, victim.pick(victim.needed()))


def cut(victim: Victim) -> None:
    key = victim.pick(victim.needed())
    victim.objects[key] = victim.objects[key][: victim.random.randrange(len(victim.objects[key]))]


def trailing_data(victim: Victim) -> None:
    key = victim.pick(victim.needed())
    victim.objects[key] += victim.random.randbytes(victim.random.randint(1, 64))


def swapped_objects(victim: Victim) -> None:
    one, other = victim.random.sample(sorted(victim.needed()), 2)
    victim.objects[one], victim.objects[other] = victim.objects[other], victim.objects[one]


def missing_object(victim: Victim) -> None:
    del victim.objects[victim.pick(victim.needed())]


def overwritten_run(victim: Victim) -> None:
    key = victim.pick(victim.needed())
    data = victim.objects[key]
    at, length = victim.random.randrange(len(data)), victim.random.randint(4, 40)
    changed = data[:at] + victim.random.randbytes(length) + data[at + length :]
    victim.objects[key] = changed if changed != data else data + b"x"


def second_frame(victim: Victim) -> None:
    statement = victim.statement
    blob = victim.random.choice([*statement.packs, statement.table])
    victim.objects[pack_key(statement.artifact, blob.digest)] += zstandard.compress(victim.random.randbytes(9))


def wrong_key(victim: Victim) -> None:
    labels = (f"wrong{victim.random.randrange(3)}",)
    if victim.random.random() < 0.5:
        victim.objects[victim.index_key] = authority.sealed_index(victim.index, *labels)
    else:
        payload = open_envelope(victim.objects[victim.statement_key], STATEMENT_PAYLOAD_TYPE, "x").payload
        envelope = authority.sealed(payload, STATEMENT_PAYLOAD_TYPE, *labels)
        row = replace(victim.index.rows[0], statement=sha256(envelope), size_bytes=len(envelope))
        victim.objects[victim.statement_key] = envelope
        victim.objects[victim.index_key] = authority.sealed_index(replace(victim.index, rows=(row,)))


def no_key(victim: Victim) -> None:
    key, kind = victim.random.choice([(victim.index_key, PAYLOAD_TYPE), (victim.statement_key, STATEMENT_PAYLOAD_TYPE)])
    victim.objects[key] = seal(open_envelope(victim.objects[key], kind, "x").payload, kind)


def key_of_another_role(victim: Victim) -> None:
    if victim.random.random() < 0.5:
        victim.objects[victim.index_key] = authority.sealed_index(victim.index, "s")
    else:
        payload = open_envelope(victim.objects[victim.statement_key], STATEMENT_PAYLOAD_TYPE, "x").payload
        envelope = authority.sealed(payload, STATEMENT_PAYLOAD_TYPE, "i")
        row = replace(victim.index.rows[0], statement=sha256(envelope), size_bytes=len(envelope))
        victim.objects[victim.statement_key] = envelope
        victim.objects[victim.index_key] = authority.sealed_index(replace(victim.index, rows=(row,)))


def foreign_name(victim: Victim) -> None:
    field, value = victim.random.choice(
        [("name", "other"), ("channel", "canary"), ("version", victim.random.randint(2, 10**6)), ("name", "../demo")]
    )
    victim.objects[victim.index_key] = authority.sealed_index(replace(victim.index, **{field: value}))


def unknown_field(victim: Victim) -> None:
    payload = json.loads(open_envelope(victim.objects[victim.statement_key], STATEMENT_PAYLOAD_TYPE, "x").payload)
    place = victim.random.choice(
        [payload, payload["predicate"], payload["predicate"]["entries"][0], payload["predicate"]["table"]]
    )
    place[f"field{victim.random.randrange(1000)}"] = victim.random.choice([1, None, [], "x"])
    victim.sign(canonical_bytes(payload))


def missing_field(victim: Victim) -> None:
    payload = json.loads(open_envelope(victim.objects[victim.statement_key], STATEMENT_PAYLOAD_TYPE, "x").payload)
    place = victim.random.choice(
        [payload, payload["predicate"], payload["predicate"]["entries"][0], payload["predicate"]["table"]]
    )
    del place[victim.random.choice(sorted(place))]
    victim.sign(canonical_bytes(payload))


def wrong_type(victim: Victim) -> None:
    payload = json.loads(open_envelope(victim.objects[victim.statement_key], STATEMENT_PAYLOAD_TYPE, "x").payload)
    place = victim.random.choice(
        [payload["predicate"], payload["predicate"]["table"], payload["predicate"]["packs"][0]]
    )
    name = victim.random.choice(sorted(place))
    kind = type(place[name])
    others = [1.5, -1, True, "x", [[]], {"a": 1}, None]
    place[name] = victim.random.choice([value for value in others if type(value) is not kind or value == -1])
    victim.sign(canonical_bytes(payload))


def other_format(victim: Victim) -> None:
    number = victim.random.choice([0, 2, 3, 99, -1, 2**50])
    which = victim.random.randrange(3)
    if which == 0:
        victim.sign_statement(format=number)
    elif which == 1:
        victim.objects[victim.index_key] = authority.sealed_index(replace(victim.index, format=number))
    else:
        victim.sign_table({**victim.table(), "format": number})


def unsafe_path(victim: Victim) -> None:
    table = victim.table()
    up = "../" * victim.random.randint(1, 6)
    bad = [
        "/etc/cron.d/x",
        f"{up}x",
        f"inductor/{up}x",
        "inductor//x",
        "./x",
        "",
        "x\0y",
        "x\ny",
        "a\\..\\b",
        "a/..",
        "~/x",
        "x" * 600,
    ]
    row = victim.random.choice(table["files"])
    row[0] = victim.random.choice([*bad, "/".join("a" * 20), "inductor/\u202ex", "inductor/ x", ".", ".."])
    victim.sign_table(table)


def colliding_names(victim: Victim) -> None:
    table = victim.table()
    one, other = victim.random.sample(table["files"], 2)
    one[0] = victim.random.choice([other[0], f"{other[0]}/x", other[0].rpartition("/")[0]])
    victim.sign_table(table)


def odd_mode_or_kind(victim: Victim) -> None:
    table = victim.table()
    row = victim.random.choice(table["files"])
    row[1] = victim.random.choice(
        [0o777, 0o4755, 0o2755, 0o120777, 0o060644, 0o020644, 0o010644, 0, -1, 0o666, "0644", None]
    )
    victim.sign_table(table)


def lying_segments(victim: Victim) -> None:
    table = victim.table()
    row = victim.random.choice([row for row in table["files"] if row[4]])
    segment = victim.random.choice(row[4])
    at = victim.random.randrange(3)
    segment[at] += victim.random.choice([-1, 1, 7, 2**31, -(2**31), 8 << 20])
    if victim.random.random() < 0.3:
        row[4] = [*row[4], row[4][0]]
    victim.sign_table(table)


def lying_sizes(victim: Victim) -> None:
    statement = victim.statement
    delta = victim.random.choice([-1, 1, 1000, 2**33])
    which = victim.random.randrange(5)
    if which == 0:
        victim.sign_statement(unpacked_bytes=max(0, statement.unpacked_bytes + delta))
    elif which == 1:
        victim.sign_statement(files=statement.files + abs(delta))
    elif which == 2:
        blob = replace(statement.packs[0], raw_bytes=max(0, statement.packs[0].raw_bytes + delta))
        victim.sign_statement(packs=(blob, *statement.packs[1:]))
    elif which == 3:
        blob = replace(statement.packs[0], size_bytes=max(0, statement.packs[0].size_bytes + delta))
        victim.sign_statement(packs=(blob, *statement.packs[1:]))
    else:
        victim.sign_statement(table=replace(statement.table, raw_bytes=statement.table.raw_bytes + abs(delta)))


def malformed_file_digest(victim: Victim) -> None:
    # A well-formed wrong one is a builder's mistake, and harmless: the digest of the pack covers the same bytes.
    table = victim.table()
    row = victim.random.choice(table["files"])
    row[3] = victim.random.choice(
        [f"{row[3][:-1]}G", f"F{row[3][1:]}", row[3][:-1], "", row[3] + "0", None, 7, [row[3]]]
    )
    victim.sign_table(table)


def bomb(victim: Victim) -> None:
    statement = victim.statement
    size = victim.random.choice([1, 16, 64]) << 20
    frame = zstandard.ZstdCompressor(write_checksum=True, write_content_size=victim.random.random() < 0.5).compress(
        bytes(size)
    )
    if victim.random.random() < 0.5:  # in the place of a pack, signed as one of the old raw size
        blob = replace(statement.packs[0], digest=sha256(frame), size_bytes=len(frame))
        victim.objects[pack_key(statement.artifact, blob.digest)] = frame
        victim.sign_statement(packs=(blob, *statement.packs[1:]))
    else:
        blob = Blob(sha256(frame), len(frame), statement.table.raw_bytes)
        victim.objects[pack_key(statement.artifact, blob.digest)] = frame
        victim.sign_statement(table=blob)


FAMILIES: tuple[Callable[[Victim], None], ...] = (
    flipped_bit, cut, trailing_data, swapped_objects, missing_object, overwritten_run, second_frame, wrong_key, no_key,
    key_of_another_role, foreign_name, unknown_field, missing_field, wrong_type, other_format, unsafe_path,
    colliding_names, odd_mode_or_kind, lying_segments, lying_sizes, malformed_file_digest, bomb,
)  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], TrustChoice]:
    folder = tmp_path_factory.mktemp("corrupted")
    store = MemoryStore(authority.choice(folder / "publisher"))
    publish(store, "demo", "stable", make_artifact(folder), NOW)
    return store.objects, TrustChoice(policy_file=authority.write_policy(folder / "trust.json"))


def load(objects: dict[str, bytes], choice: TrustChoice, target: Path) -> None:
    """Does what a restore does, from the hint to the last file."""
    store = MemoryStore(choice, objects)
    store.trust = StoreTrust(choice, "", store.url, NOW)
    index = read_channel(store, "demo", "stable", NOW).index
    statement = read_artifact(store, select(index.rows, MACHINE, "demo", index.revoked), "demo").statement
    table = read_file_table(store, statement)
    sizes = {pack.digest: pack.size_bytes for pack in statement.packs}

    def fetch(digest: str) -> bytes:
        data = store.get(pack_key(statement.artifact, digest), sizes[digest])
        if data is None:
            raise IntegrityError("pack", "missing")
        return data

    for pack in statement.packs:  # as `materialise` does, without its pauses between tries
        open_blob(fetch(pack.digest), pack)
    materialise(fetch, statement.packs, table, target, str(target), deadline=time.monotonic() + 60)


def below(folder: Path) -> list[str]:
    return sorted(os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)


def test_what_was_not_corrupted_is_accepted(tmp_path: Path, published: tuple[dict[str, bytes], TrustChoice]) -> None:
    objects, choice = published
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    load(dict(objects), choice, target)
    assert len(below(target)) == 3
    for key in (hint_key("demo", "stable"), statement_key(Victim(dict(objects), random.Random(0)).statement.artifact)):
        assert key in objects


def test_a_thousand_corrupted_artifacts_are_all_refused(
    tmp_path: Path, published: tuple[dict[str, bytes], TrustChoice]
) -> None:
    objects, choice = published
    accepted, foreign, slow = [], [], []
    before = set(below(Path("/etc/cron.d"))) | set(below(tmp_path))
    rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target = tmp_path / "around" / "target"
    target.parent.mkdir()
    for family in FAMILIES:
        for seed in range(SEEDS):
            victim = Victim(dict(objects), random.Random(f"{family.__name__} {seed}"))
            family(victim)
            case = f"{family.__name__} {seed}"
            target.mkdir(mode=0o700)
            began = time.monotonic()
            try:
                load(victim.objects, choice, target)
                accepted.append(case)
            except CachepipeError as error:
                if type(error) is CachepipeError:
                    foreign.append(f"{case}: {error}")
            except Exception as error:  # the point of this test: anything that is not ours
                foreign.append(f"{case}: {type(error).__name__}: {error}")
            if time.monotonic() - began > 2:
                slow.append(case)
            assert os.listdir(target.parent) == ["target"], case
            shutil.rmtree(target)
    cases = len(FAMILIES) * SEEDS
    assert cases >= 1000
    assert (accepted, foreign, slow) == ([], [], [])
    assert not (set(below(Path("/etc/cron.d"))) | set(below(tmp_path))) - before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_kib < MEMORY_LIMIT_KIB
