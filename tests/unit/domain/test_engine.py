from __future__ import annotations

from cachepipe.domain.engine import differences, engine_folder, in_words


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


def test_an_entrys_folder_follows_its_key_not_its_name() -> None:
    assert engine_folder("0123456789abcdef" * 4) == "engine/0123456789abcdef"
