"""The command line: fast help, one boundary for errors, data on stdout."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cachepipe import __version__, errors
from cachepipe.cli.boundary import BoundedGroup, run
from cachepipe.cli.main import VERBS, cli
from tests.support.release import cachepipe_argv, clean_environment, run_cachepipe

HEAVY = ("torch", "pydantic", "boto3", "rich", "yaml", "zstandard", "asyncio")


def commands() -> list[tuple[str, click.Command]]:
    context = click.Context(cli, info_name="cachepipe")
    found = [(name, cli.get_command(context, name)) for name in VERBS]
    return [(name, command) for name, command in found if command is not None]


def test_no_text_names_a_command_that_does_not_exist() -> None:
    package = Path(errors.__file__).parent
    readme = package.parent / "README.md"
    named = {
        (path.name, word)
        for path in (*package.rglob("*.py"), *([readme] if readme.exists() else ()))
        for word in re.findall(r"`cachepipe ([a-z]+)", path.read_text(encoding="utf-8"))
    }
    assert named and {pair for pair in named if pair[1] not in VERBS} == set()


def test_help_lists_every_verb_without_importing_one() -> None:
    script = (
        "import sys; from cachepipe.cli.main import main; code = main(['--help']);"
        f"print([m for m in {HEAVY!r} if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    for name, verb in VERBS.items():
        assert name in done.stdout
        assert verb.help.split()[0] in done.stdout


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_with_examples_and_a_short_option(name: str) -> None:
    done = run_cachepipe(name, "-h")
    assert done.returncode == 0, done.stderr
    assert "Examples:" in done.stdout
    assert f"cachepipe {name}" in done.stdout


def test_every_long_option_has_its_variable() -> None:
    for name, command in commands():
        for parameter in command.params:
            if not isinstance(parameter, click.Option):
                continue
            flags = [flag for flag in parameter.opts if flag.startswith("--")]
            variable = "CACHEPIPE_" + flags[0].removeprefix("--").replace("-", "_").upper()
            # CACHEPIPE_STRICT is the service's own: there a late compile becomes an error
            variable = "CACHEPIPE_RESTORE_STRICT" if variable == "CACHEPIPE_STRICT" else variable
            envvar = parameter.envvar
            known = [envvar] if isinstance(envvar, str) else list(envvar or ())
            assert variable in known, f"{name} {flags[0]}"


def test_version_is_data() -> None:
    done = run_cachepipe("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cachepipe {__version__}\n", "")


def test_no_command_shows_help_and_is_a_usage_error() -> None:
    done = run_cachepipe()
    assert done.returncode == 2
    assert "Commands:" in done.stderr
    assert done.stdout == ""


def test_an_unknown_option_is_one_line_and_a_hint() -> None:
    done = run_cachepipe("ls", "--nmae", "x")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: no such option")
    assert "--nmae" in lines[0]
    assert "--name" in lines[0]
    assert lines[-1] == "hint: see `cachepipe ls --help`"
    assert done.stdout == ""


def test_a_missing_store_is_a_usage_error() -> None:
    done = run_cachepipe("ls")
    assert done.returncode == 2
    assert "error: no store is given" in done.stderr


def test_an_address_that_is_none_is_refused_in_words() -> None:
    done = run_cachepipe("ls", "gs://ml-cache/prod")
    assert done.returncode == 15
    assert "file:///" in done.stderr


def test_with_json_an_error_is_an_object_on_stdout(tmp_path: Path) -> None:
    done = run_cachepipe("ls", "gs://ml-cache/prod", "--json")
    assert done.returncode == 15
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "StoreError"
    assert error["exit_code"] == 15
    assert set(error) == {"kind", "message", "hint", "exit_code"}


def test_every_problem_of_a_manifest_is_a_line(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text("version: 1\nname: x\nmodel: []\nchanel: y\n")
    done = run_cachepipe("plan", str(manifest))
    assert done.returncode == 10
    problems = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(problems) >= 3
    assert any("chanel" in line and "channel" in line for line in problems)


def group_that_raises(error: BaseException) -> BoundedGroup:
    @click.group(cls=BoundedGroup)
    def group() -> None:
        pass

    @group.command("go")
    @click.option("--json", is_flag=True)
    def go(json: bool) -> None:
        raise error

    return group


def boundary(error: BaseException, *words: str) -> int:
    return run(group_that_raises(error), ["go", *words], "_CACHEPIPE_COMPLETE")


@pytest.mark.parametrize(
    "error",
    [
        errors.UsageError("x"),
        errors.ManifestError(["a:1: b: c"]),
        errors.BuildError("m/float32/default", "tune", "no graph"),
        errors.MissError("x"),
        errors.IntegrityError("pack", "size", wanted=1, found=2),
        errors.TrustError("x"),
        errors.StoreError("x"),
        errors.ConflictError("x"),
        errors.UnsafePathError("/x", "open to others"),
        errors.VerificationError(["a"]),
        errors.FingerprintMismatchError(["cpu: wanted a, found b"]),
        errors.NoRoomError("x"),
        errors.DeadlineError("x"),
        errors.Interrupted("interrupted"),
        errors.Terminated("terminated"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_of_the_tree_leaves_with_its_own_code(
    error: errors.CachepipeError, capsys: pytest.CaptureFixture[str]
) -> None:
    assert boundary(error, "--json") == error.exit_code
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["exit_code"] == error.exit_code
    assert err.splitlines()[-1] == f"hint: {error.hint}"


def test_a_name_begins_no_line_of_its_own_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    breaks = ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
    boundary(errors.IntegrityError("a" + "error: b".join(breaks), "size"))
    err = capsys.readouterr().err
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_the_readme_documents_every_exit_code() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    table = readme.split("### Exit codes")[1].split("## Manifest")[0]
    tree = ast.parse(Path(str(errors.__file__)).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    for name in names:
        assert str(getattr(errors, name).exit_code) in table, name


def test_an_unexpected_exception_is_one_line_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary(ZeroDivisionError("by zero")) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[0] == "error: ZeroDivisionError: by zero"
    assert "Traceback" not in err


def test_debug_adds_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CACHEPIPE_DEBUG", "1")
    assert boundary(ZeroDivisionError("by zero")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert boundary(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.splitlines()[0] == "error: interrupted"


def test_a_reader_that_went_away_is_no_traceback_and_no_success() -> None:
    words = shlex.join(cachepipe_argv("completion", "bash"))
    done = subprocess.run(
        ["bash", "-c", f"exec 3> >(exec true); wait $!; {words} >&3; echo code $?"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "code 141\n"
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_the_command(shell: str) -> None:
    done = run_cachepipe("completion", shell)
    assert done.returncode == 0, done.stderr
    assert "_CACHEPIPE_COMPLETE" in done.stdout


def test_completion_offers_verbs_without_importing_them() -> None:
    env = clean_environment(_CACHEPIPE_COMPLETE="bash_complete", COMP_WORDS="cachepipe pro", COMP_CWORD="1")
    done = run_cachepipe(env=env)
    assert done.stdout.split() == ["plain,promote"]


def test_every_verb_of_the_table_is_a_command() -> None:
    for name, verb in VERBS.items():
        module = importlib.import_module(f"cachepipe.cli.{verb.module}")
        assert getattr(module, f"{name}_command").name == name


def test_what_a_terminal_would_obey_is_shown_and_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    boundary(errors.BuildError("net", "tune", "a\x1b[2Jb\x00c\x9bd é", hint="see \x1b]0;x\x07"))
    err = capsys.readouterr().err
    assert err.isascii() is False and "é" in err
    assert "a\\x1b[2Jb\\x00c\\x9bd" in err and not set(err) & set("\x1b\x00\x9b\x07")


@pytest.mark.parametrize("gate", ["--min-hit-rate", "--min-speedup"])
@pytest.mark.parametrize("number", ["nan", "inf", "-1"])
def test_a_gate_that_could_never_refuse_is_a_usage_error(tmp_path: Path, gate: str, number: str) -> None:
    (tmp_path / "manifest.yaml").touch()
    finished = run_cachepipe("verify", str(tmp_path / "manifest.yaml"), gate, number)
    assert finished.returncode == 2 and gate in finished.stderr


def test_a_shell_that_completes_words_makes_nothing(tmp_path: Path) -> None:
    for name, words in (
        ("verify", ["--junit", "a/b.xml"]),
        ("verify", ["--report", "c"]),
        ("report", ["--html", "d/e"]),
    ):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        given = [words[0], str(tmp_path / words[1])]
        command.make_context(name, ["manifest.yaml", *given], resilient_parsing=True)
    assert not list(tmp_path.iterdir())
