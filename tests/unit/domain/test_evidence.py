"""Evidence: an error of the user's code is told, whatever it is made of."""

from __future__ import annotations

from cachepipe.domain.evidence import words_of


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_cannot_say_what_it_is_is_told_by_its_kind() -> None:
    assert words_of(Silent()) == "Silent: its words cannot be read"
    assert words_of(KeyError("a")) == "KeyError: 'a'"
