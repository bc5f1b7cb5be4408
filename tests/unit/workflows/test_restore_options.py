from __future__ import annotations

import pytest

from cachepipe.errors import UsageError
from cachepipe.workflows.restore_options import OPTIONS, Options, parse


def test_words_become_options_and_the_rest_the_command() -> None:
    words = [
        "file:///s",
        "--name",
        "a",
        "--name=b",
        "--channel",
        "beta",
        "--deadline",
        "5",
        "--strict",
        "--",
        "serve",
        "--name",
        "x",
        "--",
        "y",
    ]
    assert parse(words, {}) == Options(
        store="file:///s",
        names=("a", "b"),
        channel="beta",
        deadline_s=5.0,
        is_strict=True,
        command=("serve", "--name", "x", "--", "y"),
    )


def test_every_option_has_its_variable_and_the_words_win() -> None:
    environment = {
        "CACHEPIPE_STORE": "/s",
        "CACHEPIPE_NAME": "a,b",
        "CACHEPIPE_LOCK": "l1,l2",
        "CACHEPIPE_CHANNEL": "beta",
        "CACHEPIPE_DEST": "/d",
        "CACHEPIPE_RESTORE_STRICT": "1",
        "CACHEPIPE_DEADLINE": "7",
        "CACHEPIPE_ENV_FILE": "e",
        "CACHEPIPE_STATE_DIR": "/st",
        "CACHEPIPE_NO_ATTACH": "true",
        "CACHEPIPE_TRUST": "/p",
        "CACHEPIPE_INSECURE_UNSIGNED": "1",
        "CACHEPIPE_JSON": "0",
    }
    assert set(environment) == {option.variable for option in OPTIONS} | {"CACHEPIPE_STORE"}
    found = parse([], environment)
    assert found == Options(
        "/s", ("a", "b"), "beta", ("l1", "l2"), "/d", True, 7.0, "e", "/st", True, "/p", True, False, ()
    )
    assert parse(["--name", "c", "/other"], environment).names == ("c",)
    assert parse(["--name", "c", "/other"], environment).store == "/other"


def test_the_service_strictness_is_not_that_of_restore() -> None:
    assert not parse([], {"CACHEPIPE_STRICT": "1"}).is_strict


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chanel", "x"], "unknown option `--chanel` of restore: did you mean `--channel`?"),
        (["--zzzz"], "unknown option `--zzzz` of restore: see `cachepipe restore --help`"),
        (["-n", "x"], "unknown option `-n`"),
        (["--name"], "`--name` needs a value: NAME"),
        (["--strict=1"], "`--strict` takes no value"),
        (["/a", "/b"], "`STORE` is given twice: `/a` and `/b`"),
        (["--dest", "a", "--dest", "b"], "`--dest` is given twice"),
        (["--deadline", "soon"], "`--deadline` is not a number of seconds"),
        (["--deadline", "nan"], "`--deadline` is not a number of seconds"),
        (["--deadline", "0"], "`--deadline` is not a number of seconds"),
    ],
)
def test_what_cannot_be_meant_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words, {})
    assert message in str(caught.value)


def test_a_command_without_its_dashes_is_guessed() -> None:
    with pytest.raises(UsageError) as caught:
        parse(["file:///store", "--name", "a", "python", "serve.py"], {})
    assert "`--`" in caught.value.hint


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(UsageError, match="`CACHEPIPE_DEADLINE` is not a number"):
        parse([], {"CACHEPIPE_DEADLINE": "1m"})
