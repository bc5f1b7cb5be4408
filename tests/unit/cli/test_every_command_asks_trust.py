"""No command reads a store without the trust that its command line chose: neither by its options nor by a forgotten argument."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cachepipe.adapters.store import TrustChoice
from cachepipe.cli.main import VERBS, cli, main
from tests.support.authority import choice, key, policy, write_policy
from tests.support.release import clean_environment
from tests.support.restoring import Published, publish_release

PACKAGE = Path(__file__).resolve().parents[3] / "cachepipe"
QUICKSTART = str(PACKAGE.parent / "manifests/quickstart.yaml")
NAME = "quickstart"
NO_STORE = {"keygen", "report", "completion"}
"""Commands that open no store."""
TAKE_NOTHING = {"plan", "build", "explain"}
"""Commands for which a channel that they may not believe is an empty one, or that want a real build first."""
FOUND = {"fsck": 13, "doctor": 18, "gc": 0}
"""Commands that list refused signatures among other findings; gc keeps whatever any index names, whoever signed it."""


@pytest.fixture
def ours(tmp_path: Path) -> TrustChoice:
    return choice(tmp_path / "ours")


@pytest.fixture
def release(tmp_path: Path, ours: TrustChoice) -> Published:
    """Two versions of the channel stable, signed by our keys."""
    publish_release(tmp_path, NAME, number=1, trust=ours)
    return publish_release(tmp_path, NAME, number=2, trust=ours)


def command_line(base: Path, verb: str, release: Published) -> list[str]:
    url, named = release.store.url, ("--name", NAME)
    refs = (f"{NAME}@stable:1", f"{NAME}@stable:2")
    return {
        "verify": ["verify", QUICKSTART, "--store", url, "--channel", "stable"],
        "restore": ["restore", url, *named, "--dest", f"{base}/dest/{NAME}", "--strict"],
        "ls": ["ls", url],
        "show": ["show", url, refs[0]],
        "diff": ["diff", url, *refs],
        "lock": ["lock", url, *named, "--output", f"{base}/new.lock"],
        "promote": ["promote", url, *named, "--from", "stable", "--to", "canary"],
        "rollback": ["rollback", url, *named],
        "revoke": ["revoke", url, *named, release.row.artifact],
        "renew": ["renew", url, *named],
        "copy": ["copy", url, f"file://{base}/copy"],
        "gc": ["gc", url, "--delete"],
        "fsck": ["fsck", url],
        "doctor": ["doctor", url, *named],
    }[verb]


def code_of(words: list[str]) -> int:
    if words[0] != "restore":
        return main(words)
    # it ends as the service that it becomes, and changes its process for that
    command = [sys.executable, "-m", "cachepipe", *words]
    return subprocess.run(command, env=clean_environment(), check=False, capture_output=True).returncode


def objects(release: Published) -> dict[str, bytes]:
    return {key: release.store.get(key, 1 << 24) or b"" for key in release.store.list("v1/")}


@pytest.mark.parametrize("verb", sorted(set(VERBS) - NO_STORE - TAKE_NOTHING))
def test_a_policy_of_other_keys_stops_every_command_that_reads(
    tmp_path: Path, ours: TrustChoice, release: Published, verb: str
) -> None:
    stranger = write_policy(tmp_path / "stranger.json", policy(key("x", "statement"), key("y", "index")))
    words = command_line(tmp_path, verb, release)
    if any("--index-key" in parameter.opts for parameter in _command(verb).params):
        words += ["--index-key", ours.index_key]
    before = objects(release)
    assert code_of([*words, "--trust", stranger]) == FOUND.get(verb, 14)
    assert objects(release) == before
    assert not (tmp_path / "new.lock").exists()
    assert not list(tmp_path.glob("copy/v1/index/**/*.json"))
    assert code_of([*words, "--trust", ours.policy_file]) not in (13, 14)


def _command(verb: str) -> click.Command:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return command


@pytest.mark.parametrize("verb", sorted(set(VERBS) - NO_STORE))
def test_every_command_that_opens_a_store_can_be_told_whom_to_trust(verb: str) -> None:
    flags = {flag for parameter in _command(verb).params for flag in parameter.opts}
    assert {"--trust", "--insecure-unsigned"} <= flags


@pytest.mark.parametrize("verb", sorted(NO_STORE))
def test_what_opens_no_store_takes_no_address_of_one(verb: str) -> None:
    names = {parameter.name for parameter in _command(verb).params}
    assert not names & {"store", "words", "source", "target"}


# --- forgotten arguments -------------------------------------------------------------------------------------------------


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def _takers(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yields name, position and parameter of each function or dataclass that takes a TrustChoice."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            parameters = [*node.args.posonlyargs, *node.args.args]
            for position, parameter in enumerate(parameters):
                if parameter.annotation is not None and "TrustChoice" in ast.unparse(parameter.annotation):
                    is_method = parameters[0].arg == "self"
                    yield node.name, position - is_method, parameter.arg
        elif isinstance(node, ast.ClassDef):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            for position, field in enumerate(fields):
                if "TrustChoice" in ast.unparse(field.annotation) and isinstance(field.target, ast.Name):
                    yield node.name, position, field.target.id
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    yield from ((node.name, *found[1:]) for found in _takers(ast.Module([item], [])))


UNTRUSTING = {"workflows/present.py: open_store"}
"""Looks only whether a later version exists; what it believes was verified when it was restored."""


def forgotten(trees: list[tuple[str, ast.Module]]) -> set[str]:
    """Returns `file: callee` for every call that leaves the choice to its default."""
    takers = {name: rest for _, tree in trees for name, *rest in _takers(tree) if name != "__init__"}
    found = set()
    for place, tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in takers:
                continue
            position, parameter = takers[name]
            given = [word.arg for word in node.keywords]
            if len(node.args) <= position and parameter not in given:
                found.add(f"{place}: {name}")
    return found


def test_no_caller_forgets_to_pass_the_choice_on() -> None:
    trees = list(_trees())
    takers = {name for _, tree in trees for name, *_ in _takers(tree)}
    assert {"open_store", "preview", "explain_files", "VerifyRequest", "BuildRequest", "DoctorRequest"} <= takers
    assert forgotten(trees) == UNTRUSTING


def test_a_forgotten_choice_is_found() -> None:
    code = "def look(url: str, trust: TrustChoice = NO_CHOICE): ...\nlook('a')\nlook('b', x)\nlook(url='c', trust=x)"
    assert forgotten([("new.py", ast.parse(code))]) == {"new.py: look"}
