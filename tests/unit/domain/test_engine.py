from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cachepipe.domain.engine import (
    FILE,
    FORMAT,
    EngineFile,
    check_own,
    differences,
    engine_folder,
    in_words,
    sealed,
    unsteady_places,
)
from cachepipe.domain.record import read_record, record_bytes
from cachepipe.errors import IntegrityError

FACTS = EngineFile(FORMAT, "2.13.0", ("x",), (), {"self.weight": "float32 [4, 8]"}, {}, (), {"bucket-0.so": "0" * 64})


def read(data: bytes) -> EngineFile:
    facts = read_record(EngineFile, data, FILE, 1 << 20)
    check_own(facts, data)
    return facts


def test_what_was_sealed_is_read_and_every_flipped_bit_is_found() -> None:
    data = sealed(FACTS)
    assert replace(read(data), own="") == FACTS
    for place in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << (place % 8)
        with pytest.raises(IntegrityError):
            read(bytes(flipped))


def test_a_file_of_a_release_that_kept_no_digests_is_read() -> None:
    tree = json.loads(record_bytes(replace(FACTS, files={})))
    del tree["files"], tree["own"], tree["unsteady"]
    assert read(json.dumps(tree).encode()).torch_version == "2.13.0"


def test_digests_without_a_seal_are_refused() -> None:
    with pytest.raises(IntegrityError, match="wanted a digest"):
        read(record_bytes(FACTS))


def test_equal_descriptions_do_not_differ() -> None:
    assert differences({"a": "1"}, {"a": "1"}) == ()
    assert in_words(()) == ""


def test_each_difference_says_what_was_built_and_what_is_here() -> None:
    found = differences({"same": "1", "other": "int 1", "gone": "int 2"}, {"same": "1", "other": "int 3", "new": "x"})
    assert found == ("other: built int 1, here int 3", "gone: built int 2, here missing", "new: not built, here x")


def test_many_differences_are_counted() -> None:
    found = differences({f"p{i}": "1" for i in range(9)}, {})
    assert in_words(found).startswith("p0: built 1, here missing; p1")
    assert in_words(found).endswith("(and 6 more)")


@pytest.mark.parametrize("kind", ["int 7", "float 7.5", "complex 7j", "str 'a'", "bytes b'a'"])
def test_a_plain_value_of_the_module_that_differs_between_two_processes_is_unsteady(kind: str) -> None:
    one = {"self.config.hash": kind, "self.width": "int 8"}
    assert unsteady_places(one, {**one, "self.config.hash": f"{kind}0"}) == ("self.config.hash",)
    assert unsteady_places(one, one) == ()


@pytest.mark.parametrize(
    ("place", "here", "there"),
    [
        ("self.weight", "parameter float32 (8,)", "parameter float32 (9,)"),
        ("self.blocks", "list of 2", "list of 3"),
        ("self.flag", "bool True", "bool False"),
        ("self.maybe", "int 1", "NoneType None"),
        ("self.sizes", "tuple [int 1]", "tuple [int 2]"),
        ("self.function", "function m.f 8f1c", "function m.f 9f1c"),
        ("class m.Block", "8f1c", "9f1c"),
        ("global m.SCALE", "float 1.0", "float 2.0"),
        ("code m:f", "missing", "function m.f 9f1c"),
    ],
)
def test_structure_code_and_switches_are_compared_even_where_two_processes_differ(
    place: str, here: str, there: str
) -> None:
    assert unsteady_places({place: here}, {place: there}) == ()


def test_places_that_one_process_alone_has_are_compared() -> None:
    assert unsteady_places({"self.late": "int 1"}, {}) == ()
    assert unsteady_places({}, {"self.late": "int 1"}) == ()


def test_an_entrys_folder_follows_its_key_not_its_name() -> None:
    assert engine_folder("0123456789abcdef" * 4) == "engine/0123456789abcdef"
