"""What the README says of S3 is what the code does: each answer has its word, each parameter its variables."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from cachepipe.adapters import s3_settings
from cachepipe.adapters.s3_errors import Refusal, no_credentials, refused, unreachable
from cachepipe.adapters.s3_settings import read_settings
from cachepipe.errors import StoreError
from tests.support.release import REPOSITORY

SECTION = (REPOSITORY / "README.md").read_text().split("## S3 in five lines")[1].split("\n## ")[0]
BARE = {"HOME": "/nonexistent"}
SETTINGS = read_settings("s3://ml-cache/prod", BARE)
WITH_A_CODE = {"ExpiredToken": 400, "AuthorizationHeaderMalformed": 400, "NoSuchBucket": 404}
WITH_A_CODE |= {"SignatureDoesNotMatch": 403, "RequestTimeTooSkewed": 403}


def table(first: str) -> list[list[str]]:
    """Returns the cells of the table whose head begins with a word."""
    lines = SECTION.split(f"| {first} |")[1].splitlines()[2:]
    rows = [line for line in lines[: lines.index("")] if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


ERRORS = {cells[0].strip("`"): cells[1] for cells in table("word")}
ANSWERS = [
    *((word, int(status), "") for word, text in ERRORS.items() for status in re.findall(r"\b(\d{3})\b(?! `)", text)),
    *((word, WITH_A_CODE[code], code) for word, text in ERRORS.items() for code in re.findall(r"`(\w+)`", text)),
]


def test_every_word_stands_in_the_table_and_no_other() -> None:
    kinds = {refused(Refusal(status, code, ""), "read", "v1/a", SETTINGS).kind for _, status, code in ANSWERS}
    kinds |= {no_credentials("env", "none", SETTINGS).kind, unreachable("reset", SETTINGS).kind}
    assert kinds == set(ERRORS)
    assert len(ANSWERS) > 15


@pytest.mark.parametrize(("word", "status", "code"), ANSWERS)
def test_an_answer_is_counted_under_its_word(word: str, status: int, code: str) -> None:
    error = refused(Refusal(status, code, ""), "read", "v1/a", SETTINGS)
    assert (error.kind, error.exit_code) == (word, 15)
    assert str(status) in str(error) and error.hint


def test_every_parameter_stands_in_the_table_with_variables_that_count() -> None:
    rows = {cells[0].strip("`").partition("=")[0]: re.findall(r"`(\w+)`", cells[1]) for cells in table("parameter")}
    assert set(rows) == set(s3_settings._PARAMETERS)
    values = {"endpoint": "http://h", "path_style": "true", "unsigned": "true", "checksums": "false"}
    for parameter, variables in rows.items():
        value = values.get(parameter, "x")
        said = read_settings(f"s3://ml-cache/prod?{parameter}={value}", BARE)
        assert said != SETTINGS and variables
        for variable in variables:
            assert read_settings("s3://ml-cache/prod", {**BARE, variable: value}) == said, variable
    with pytest.raises(StoreError):
        read_settings("s3://ml-cache/prod?nothing=x", {})


def test_boto3_reads_where_the_readme_says_so_and_nowhere_else(tmp_path: Path) -> None:
    def is_read_by_boto3(*names: str) -> bool:
        values = {name: str(file) if name in s3_settings._FILES else "true" for name in names}
        return read_settings("s3://ml-cache/prod", {**BARE, **values}).needs_boto3

    (file := tmp_path / "config").write_text("")
    (text,) = [part for part in SECTION.split("\n\n") if part.startswith("boto3 reads")]
    pairs = [*re.findall(r"`(AWS_\w+)` without\s+`(AWS_\w+)`", text), tuple(reversed(s3_settings._STATIC_KEYS))]
    alone = set(re.findall(r"`(AWS_\w+)`", text)) - {name for pair in pairs for name in pair}
    assert len(pairs) == 4 and {*s3_settings._BOTO3_ALONE, *s3_settings._FILES, "AWS_TOKEN"} < alone
    assert all(is_read_by_boto3(name) for name in alone)
    for name, other in pairs:
        assert is_read_by_boto3(name) and not is_read_by_boto3(name, other), name
        assert not is_read_by_boto3(name, *s3_settings._STATIC_KEYS), name
    source = set(re.findall(r'"(AWS_\w+)"', inspect.getsource(s3_settings)))
    others = source - alone - {name for pair in pairs for name in pair} - {"AWS_PROFILE"}
    assert not any(is_read_by_boto3(name) for name in others - {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"})


def test_the_server_for_local_use_tells_nobody_and_listens_to_this_machine_alone() -> None:
    (line,) = [line for line in SECTION.splitlines() if "weed mini" in line]
    assert {"-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"} <= set(line.split())
