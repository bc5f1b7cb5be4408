from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from cachepipe.adapters.sources import Sources, distribution_versions, model_sources, source_digest
from tests.support.manifests import write_sources


def _sources(folder: Path, reference: str = "net:make", patterns: tuple[str, ...] = ()) -> Sources:
    return model_sources({"factory": reference}, patterns, folder, [folder])


def test_sources_are_the_module_and_what_it_imports_locally(tmp_path: Path) -> None:
    write_sources(
        tmp_path,
        net="import torch\nfrom app.layers import Block\ndef make():\n    import late\n    return Block()\n",
        late="import numpy as np, os\n",
        **{"app/__init__": ""},
        app__layers="from . import helpers\nfrom .deep.more import x\nfrom .helpers import name\nclass Block: ...\n",
        app__helpers="name = 1\n",
        app__deep__more="from ..relative import y\nx = y\n",
        app__relative="import importlib\ny = importlib.import_module('app.dynamic')\n",
        app__dynamic="",
        app__unused="",
        unused="",
    )
    found = _sources(tmp_path)
    assert not found.problems
    assert sorted(found.digests) == [
        "app/__init__.py",
        "app/deep/more.py",
        "app/dynamic.py",
        "app/helpers.py",
        "app/layers.py",
        "app/relative.py",
        "late.py",
        "net.py",
    ]
    assert found.imports == {"torch", "numpy"}


def test_nothing_is_imported(tmp_path: Path) -> None:
    write_sources(tmp_path, net="import other_of_cachepipe_test\nraise SystemExit(3)\ndef make(): ...\n")
    write_sources(tmp_path, other_of_cachepipe_test="raise SystemExit(4)\n")
    assert not _sources(tmp_path).problems
    assert "other_of_cachepipe_test" not in sys.modules


def test_circular_imports_end(tmp_path: Path) -> None:
    write_sources(tmp_path, net="import b\ndef make(): ...\n", b="import net\n")
    assert sorted(_sources(tmp_path).digests) == ["b.py", "net.py"]


SOURCE = b'"""Text."""\nSIZE = 4\n\ndef make(x):\n    return x * SIZE\n'


@pytest.mark.parametrize(
    "same",
    [
        b"# a comment\n" + SOURCE,
        SOURCE.replace(b"\n\n", b"\n\n\n\n"),
        SOURCE + b"\n# end\n",
        SOURCE.replace(b"x * SIZE", b"(x  *  SIZE)  # why"),
        SOURCE.replace(b"\n", b"\r\n"),
    ],
)
def test_comments_blank_lines_and_layout_do_not_count(same: bytes) -> None:
    assert source_digest(same, is_python=True) == source_digest(SOURCE, is_python=True)
    assert source_digest(same, is_python=False) != source_digest(SOURCE, is_python=False)


@pytest.mark.parametrize("old, new", [(b"= 4", b"= 5"), (b"x *", b"x +"), (b"def make", b"def made"), (b"4", b"4.0")])
def test_code_counts(old: bytes, new: bytes) -> None:
    assert source_digest(SOURCE.replace(old, new), is_python=True) != source_digest(SOURCE, is_python=True)


def test_a_file_that_is_not_python_counts_by_its_bytes() -> None:
    assert source_digest(b"{% x %}", is_python=True) == source_digest(b"{% x %}", is_python=False)


def test_patterns_add_files_of_any_kind(tmp_path: Path) -> None:
    write_sources(tmp_path, net="def make(): ...\n", extra__a="import zlib_of_nobody\n", extra__deep__b="")
    (tmp_path / "extra/config.json").write_text("{}")
    (tmp_path / "extra/template.py").write_text("{% not python %}")
    (tmp_path / "extra/__pycache__").mkdir()
    (tmp_path / "extra/__pycache__/a.pyc").write_text("")
    found = _sources(tmp_path, patterns=("extra/**/*",))
    assert not found.problems
    assert sorted(found.digests) == [
        "extra/a.py",
        "extra/config.json",
        "extra/deep/b.py",
        "extra/template.py",
        "net.py",
    ]
    assert found.imports == {"zlib_of_nobody"}


@pytest.mark.parametrize("pattern", ["nothing/*.py", "extra", "a**b"])
def test_a_pattern_that_matches_nothing_is_a_problem(tmp_path: Path, pattern: str) -> None:
    write_sources(tmp_path, net="def make(): ...\n", extra__a="")
    (problem,) = _sources(tmp_path, patterns=("*.py", pattern)).problems
    assert problem == (("sources", 1), f"no file matches `{pattern}`")


def test_a_source_is_named_by_its_place_below_python_path(tmp_path: Path) -> None:
    write_sources(tmp_path, src__net="def make(): ...\n", elsewhere__data="", manifests__x="")
    found = model_sources(
        {"factory": "net:make"}, ("../src/*.py", "../elsewhere/*.py"), tmp_path / "manifests", [tmp_path / "src"]
    )
    assert sorted(found.digests) == ["../elsewhere/data.py", "net.py"]


def test_two_files_with_one_name_below_two_folders_both_count(tmp_path: Path) -> None:
    write_sources(tmp_path, a__net="def make(): ...\n", b__net="def make(): return 1\n")
    found = model_sources({"factory": "net:make"}, ("b/*.py",), tmp_path, [tmp_path / "a", tmp_path / "b"])
    assert sorted(found.digests) == ["b/net.py", "net.py"]


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nett:make", "no module `nett` in"),
        ("app.nothing:make", "no module `app.nothing` in"),
        ("net:mke", "no `mke` in module `net`; did you mean `make`?"),
        ("broken:make", "broken.py, line 2: not Python"),
    ],
)
def test_a_reference_that_leads_nowhere_is_a_problem(tmp_path: Path, reference: str, words: str) -> None:
    write_sources(tmp_path, net="def make(): ...\n", app__x="", broken="x = 1\ndef (:\n")
    (problem,) = _sources(tmp_path, reference).problems
    assert problem.place == ("factory",)
    assert words in problem.message


@pytest.mark.parametrize(
    "text",
    [
        "make = 1",
        "make: int = 1",
        "from x import *",
        "if True:\n    make = 1",
        "from x import a as make",
        "class make: ...",
    ],
)
def test_every_way_to_bind_a_name_is_seen(tmp_path: Path, text: str) -> None:
    write_sources(tmp_path, net=text, x="")
    assert not _sources(tmp_path).problems


def test_an_installed_factory_counts_by_its_distribution(tmp_path: Path) -> None:
    found = _sources(tmp_path, "yaml:safe_load")
    assert (found.digests, found.imports, found.problems) == ({}, {"yaml"}, [])
    assert distribution_versions(found.imports) == {"pyyaml": importlib.metadata.version("PyYAML")}


def test_a_module_that_nobody_provides_is_absent() -> None:
    assert distribution_versions({"module_of_nobody"}) == {"module_of_nobody": "absent"}


def _install(folder: Path, version: str, direct_url: str = "") -> None:
    info = folder / f"fakedist-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fakedist\nVersion: {version}\n")
    (info / "top_level.txt").write_text("fakemodule\n")
    (info / "RECORD").write_text("fakemodule/__init__.py,,\n")
    if direct_url:
        (info / "direct_url.json").write_text(direct_url)


def test_a_version_that_does_not_fix_the_files_gets_an_addition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("plain", "editable", "vcs")]
    write_sources(tmp_path, **{f"{folder.name}/fakemodule/__init__": "x = 1\n" for folder in folders})
    _install(folders[0], "1.0")
    _install(folders[1], "1.0", '{"url": "file:///x", "dir_info": {"editable": true}}')
    _install(folders[2], "1.0", '{"url": "git+x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}')

    def version(folder: Path) -> str:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            return distribution_versions({"fakemodule"})["fakedist"]

    assert version(folders[0]) == "1.0"
    assert version(folders[2]) == "1.0+abc"
    before = version(folders[1])
    assert before.startswith("1.0+")
    (folders[1] / "fakemodule/__init__.py").write_text("x = 2\n")
    assert version(folders[1]) != before
