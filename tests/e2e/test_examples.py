"""Every command line that we show parses with the real command line, and the examples say what the README promises."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cachepipe.cli.main import VERBS, cli
from cachepipe.domain.manifest import (
    CommandModel,
    CompileSettings,
    ContextSettings,
    DynamicBounds,
    FactoryModel,
    Gates,
    Manifest,
    Tolerance,
    Trust,
)
from cachepipe.workflows.restore_options import Options, parse
from tests.support.release import REPOSITORY

EXAMPLES = REPOSITORY / "ci" / "examples"


def dockerfile(name: str) -> list[tuple[str, str]]:
    """Returns (instruction, argument) pairs of a Dockerfile, continued lines joined, comments dropped."""
    lines = [line for line in (EXAMPLES / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def docker_commands(name: str) -> list[list[str]]:
    found = []
    instructions = dockerfile(name)
    for number, (instruction, argument) in enumerate(instructions):
        if instruction == "RUN":
            words = re.sub(r"^(--\S+\s+)+", "", argument)
            found += [shlex.split(part) for part in words.split("&&")]
        elif instruction == "ENTRYPOINT":
            follows = [text for kind, text in instructions[number + 1 :][:1] if kind == "CMD"]
            found.append(json.loads(argument) + (json.loads(follows[0]) if follows else []))
    return found


def containers() -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    specs = [document["spec"]["template"]["spec"] for document in documents]
    return [container for spec in specs for container in (*spec.get("initContainers", ()), *spec["containers"])]


def workflow_commands() -> list[list[str]]:
    steps = yaml.safe_load((EXAMPLES / "workflow.yaml").read_text())["jobs"]["build"]["steps"]
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    return [shlex.split(line.split(">")[0]) for line in lines]


def console_commands() -> list[list[str]]:
    text = (REPOSITORY / "README.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line, comments=True) for line in lines]


def help_commands() -> list[list[str]]:
    context = click.Context(cli, info_name="cachepipe")
    epilogs = [cli.epilog or ""]
    for name in VERBS:
        command = cli.get_command(context, name)
        assert command is not None
        epilogs.append(command.epilog or "")
    lines = [line.strip() for epilog in epilogs for line in epilog.splitlines()]
    return [shlex.split(line.split("  (")[0].split(" > ")[0]) for line in lines if line.startswith("cachepipe ")]


SHOWN = {
    "README": console_commands,
    "help": help_commands,
    "workflow": workflow_commands,
    "kubernetes": lambda: [[*c.get("command", ()), *c.get("args", ())] for c in containers()],
    "Dockerfile": lambda: docker_commands("Dockerfile"),
    "Dockerfile.baked": lambda: docker_commands("Dockerfile.baked"),
}


@pytest.fixture
def folder_with_named_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("manifests/quickstart.yaml", "manifest.yaml", "cachepipe.lock", "evidence/a.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", SHOWN)
def test_every_command_line_shown_parses(place: str, folder_with_named_files: Path) -> None:
    ours = [words for words in SHOWN[place]() if words and words[0] == "cachepipe" and len(words) > 1]
    assert ours, "nothing of ours is shown there"
    context = click.Context(cli, info_name="cachepipe")
    for _, verb, *rest in ours:
        command = cli.get_command(context, verb)
        assert command is not None, f"no such command: {verb}"
        command.make_context(verb, list(rest), parent=context)
        if verb == "restore":
            assert parse(rest, {}).names, rest


def restores(commands: list[list[str]]) -> list[Options]:
    return [parse(words[2:], {}) for words in commands if words[:2] == ["cachepipe", "restore"]]


def test_the_image_makes_the_cache_root_compiles_bytecode_and_pins_by_lock() -> None:
    text = " ; ".join(argument for _, argument in dockerfile("Dockerfile"))
    assert re.search(r"install -d -m 0700 -o service -g service /var/cache/cachepipe", text)
    assert "python -m compileall" in text
    assert "-r ci/torch-pin.txt" in text
    assert ("COPY", "cachepipe.lock /app/cachepipe.lock") in dockerfile("Dockerfile")
    (options,) = restores(docker_commands("Dockerfile"))
    assert options.locks == ("/app/cachepipe.lock",)
    assert options.command[:2] == ("python", "/app/ci/examples/service.py")


def test_the_service_stage_has_no_compiler_and_does_not_run_as_root() -> None:
    stages: dict[str, list[tuple[str, str]]] = {}
    for instruction, argument in dockerfile("Dockerfile"):
        if instruction == "FROM":
            stages[argument.split(" AS ")[1]] = []
        stages[list(stages)[-1]].append((instruction, argument))
    assert any("g++" in argument for _, argument in stages["builder"])
    assert not any("g++" in argument for _, argument in stages["service"] + stages["base"])
    assert ("USER", "service") in stages["service"]


def test_the_baked_image_fails_to_build_without_its_cache_and_starts_offline() -> None:
    at_build, at_start = restores(docker_commands("Dockerfile.baked"))
    assert at_build.is_strict
    assert not at_build.command
    assert not at_start.is_strict
    assert not at_start.store
    assert at_build.locks == at_start.locks


def test_kubernetes_restores_in_the_entrypoint_and_in_an_init_container() -> None:
    found = restores([[*c.get("command", ()), *c.get("args", ())] for c in containers()])
    assert all(options.command for options in found), "no miss keeps a pod from starting"
    assert found[1].command == ("true",)
    prepare = next(c for c in containers() if c["name"] == "private-folder")
    assert prepare["command"][:4] == ["install", "-d", "-m", "0700"]
    probes = [c["readinessProbe"]["httpGet"]["path"] for c in containers() if "readinessProbe" in c]
    assert probes == ["/healthz", "/healthz"]


def test_the_workflow_plans_builds_verifies_reports_promotes_and_locks() -> None:
    verbs = [words[1] for words in workflow_commands() if words[:1] == ["cachepipe"]]
    assert verbs == ["plan", "build", "verify", "report", "promote", "lock"]


def test_files_that_examples_name_exist() -> None:
    for path in EXAMPLES.glob("*"):
        for name in re.findall(r"\b(?:ci|manifests)/[\w./-]+\.\w+", path.read_text() if path.is_file() else ""):
            assert (REPOSITORY / name).exists(), f"{path.name}: {name}"


def test_the_manifest_reference_names_every_field() -> None:
    reference = (REPOSITORY / "README.md").read_text().split("## Manifest reference")[1].split("\n## ")[0]
    models = (
        Manifest,
        FactoryModel,
        CommandModel,
        CompileSettings,
        ContextSettings,
        DynamicBounds,
        Gates,
        Tolerance,
        Trust,
    )
    for model in models:
        for field in model.model_fields:
            assert re.search(rf"\b{field}\b", reference), f"{model.__name__}.{field}"


def test_the_command_list_of_the_readme_is_the_command_line() -> None:
    commands = (REPOSITORY / "README.md").read_text().split("## Commands")[1].split("```")[1]
    assert set(re.findall(r"^cachepipe (\w+)", commands, re.MULTILINE)) == set(VERBS)
