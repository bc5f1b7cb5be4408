"""Evidence: an error of the user's code is told, whatever it is made of."""

from __future__ import annotations

from cachepipe.domain.evidence import kind_of, words_of
from cachepipe.errors import UsageError


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_cannot_say_what_it_is_is_told_by_its_kind() -> None:
    assert words_of(Silent()) == "Silent: its words cannot be read"
    assert words_of(KeyError("a")) == "KeyError: 'a'"


def test_a_namesake_of_an_error_of_ours_is_not_taken_for_ours() -> None:
    theirs = type("UsageError", (Exception,), {"__module__": "click.exceptions"})
    assert (kind_of(theirs("x")), kind_of(UsageError("x"))) == ("click.exceptions.UsageError", "UsageError")
    assert words_of(theirs("x")) == "click.exceptions.UsageError: x"
