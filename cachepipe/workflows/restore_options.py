"""The options of `cachepipe restore`: one table, one parser that needs no click.

A service's start must not depend on a parser that costs 30 ms to import; the click command is made from the same table.
Every option has a variable `CACHEPIPE_…`; what the command line says wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cachepipe.errors import UsageError


class Option(NamedTuple):
    flag: str
    field: str
    """Attribute of `Options`."""
    variable: str
    kind: str
    """`text`, `folder`, `seconds` or `flag`."""
    is_multiple: bool
    metavar: str
    help: str


OPTIONS = (
    Option("--name", "names", "CACHEPIPE_NAME", "text", True, "NAME", "Release; several are merged into one folder."),
    Option("--channel", "channel", "CACHEPIPE_CHANNEL", "text", False, "CHANNEL", "Channel. [default: stable]"),
    Option("--lock", "locks", "CACHEPIPE_LOCK", "text", True, "FILE", "Lock file: accept its artifacts alone."),
    Option("--dest", "dest", "CACHEPIPE_DEST", "folder", False, "DIR", "Folder in place of the builder's."),
    Option("--strict", "is_strict", "CACHEPIPE_RESTORE_STRICT", "flag", False, "", "Fail instead of starting cold."),
    Option("--deadline", "deadline_s", "CACHEPIPE_DEADLINE", "seconds", False, "S", "Start by then. [default: 60]"),
    Option("--env-file", "env_file", "CACHEPIPE_ENV_FILE", "text", False, "FILE", "Write the variables there."),
    Option("--state-dir", "state_dir", "CACHEPIPE_STATE_DIR", "folder", False, "DIR", "Where attempts are counted."),
    Option("--no-attach", "no_attach", "CACHEPIPE_NO_ATTACH", "flag", False, "", "No report inside the service."),
    Option("--trust", "trust", "CACHEPIPE_TRUST", "text", False, "FILE", "Policy: whose signatures count."),
    Option(
        *("--insecure-unsigned", "accepts_unsigned", "CACHEPIPE_INSECURE_UNSIGNED", "flag", False, ""),
        "Accept what nobody signed.",
    ),
    Option("--json", "is_json", "CACHEPIPE_JSON", "flag", False, "", "Print one JSON object on stdout."),
)
"""`--strict` has its own variable: CACHEPIPE_STRICT is the service's, where late compiles become errors."""

STORE_VARIABLE = "CACHEPIPE_STORE"
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Options:
    """One command line of `restore`."""

    store: str = ""
    names: tuple[str, ...] = ()
    channel: str = "stable"
    locks: tuple[str, ...] = ()
    dest: str = ""
    is_strict: bool = False
    deadline_s: float = 60.0
    env_file: str = ""
    state_dir: str = ""
    no_attach: bool = False
    trust: str = ""
    """Empty: `/etc/cachepipe/trust.json`, if it exists."""
    accepts_unsigned: bool = False
    is_json: bool = False
    command: tuple[str, ...] = ()

    @property
    def has_scratch(self) -> bool:
        """Tells whether another folder than the wanted one will do; an image build (`--dest`, no command) wants its own."""
        return bool(self.command) or not self.dest


def split_command(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns our own words and the command after the first `--`."""
    words = tuple(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Returns the options in the words after `cachepipe restore`.

    Args:
        argv: `[STORE] --option value … [-- COMMAND …]`; `--option=value` is the same.
        environment: variables give what the words do not; several values of one are separated by commas.

    Raises:
        UsageError: an unknown option (the nearest known one is named), a missing or wrong value, two stores.
    """
    own, command = split_command(argv)
    values = _from_environment(environment)
    given: dict[str, Any] = {}
    queue = list(own)
    while queue:
        word = queue.pop(0)
        if not word.startswith("-"):
            _give(given, "store", "STORE", word)
            continue
        flag, equals, value = word.partition("=")
        option = _option(flag)
        if option.kind == "flag":
            if equals:
                raise UsageError(f"`{flag}` takes no value")
            given[option.field] = True
            continue
        if not equals:
            if not queue:
                raise UsageError(f"`{flag}` needs a value: {option.metavar}")
            value = queue.pop(0)
        if option.is_multiple:
            given[option.field] = (*given.get(option.field, ()), value)
        else:
            _give(given, option.field, flag, _converted(option, value, flag))
    return Options(**{**values, **given}, command=command)


def flags_alone(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Returns the command and the flags of a command line that `parse` refuses."""
    own, command = split_command(argv)
    flags: dict[str, Any] = {
        option.field: option.flag in own or _is_on(environment.get(option.variable, ""))
        for option in OPTIONS
        if option.kind == "flag"
    }
    return Options(**flags, command=command)


def _is_on(text: str) -> bool:
    return text.lower() not in _OFF


def _give(given: dict[str, Any], field: str, what: str, value: Any) -> None:
    if field in given:
        hint = "put `--` before the service's command" if field == "store" else "give it once"
        raise UsageError(f"`{what}` is given twice: `{given[field]}` and `{value}`", hint=hint)
    given[field] = value


def _option(flag: str) -> Option:
    for option in OPTIONS:
        if option.flag == flag:
            return option
    from difflib import get_close_matches  # only on the way to an error

    nearest = get_close_matches(flag, [option.flag for option in OPTIONS], 1, 0.5)
    hint = f"did you mean `{nearest[0]}`?" if nearest else "see `cachepipe restore --help`"
    raise UsageError(f"unknown option `{flag}` of restore: {hint}", hint=hint)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if environment.get(STORE_VARIABLE):
        values["store"] = environment[STORE_VARIABLE]
    for option in OPTIONS:
        text = environment.get(option.variable, "")
        if option.kind == "flag":
            values[option.field] = _is_on(text)
        elif text and option.is_multiple:
            values[option.field] = tuple(part for part in text.split(",") if part)
        elif text:
            values[option.field] = _converted(option, text, option.variable)
    return values


def _converted(option: Option, value: str, what: str) -> str | float:
    if option.kind == "folder" and value:
        try:
            return os.path.abspath(value)  # the service may change its working folder
        except OSError as error:
            raise UsageError(f"`{what}` is relative to a working folder that is gone: `{value[:80]}`") from error
    if option.kind != "seconds":
        return value
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 86_400:
        raise UsageError(f"`{what}` is not a number of seconds above 0 and up to 86400: `{value[:40]}`")
    return seconds
