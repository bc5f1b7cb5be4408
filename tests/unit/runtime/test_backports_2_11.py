"""The back-ports for torch 2.11 against its own functions: what each mends, and that it changes nothing else.

The functions are those of torch 2.11.0 and triton 3.6.0, unchanged, run in a namespace that gives them what they ask for.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cachepipe.runtime import backports

FIXTURES = Path(__file__).parents[2] / "fixtures" / "gpu" / "torch-2.11.0"
META = {"autotune_local_cache": True, "autotune_remote_cache": False}
DESCENT = {**META, "coordinate_descent_tuning": True}


class Files:
    """Stands for torch's local cache backend: one JSON file per record, which must be an object."""

    def get(self, path: str) -> Any:
        if not os.path.exists(path):
            return None
        data = Path(path).read_bytes()
        found = json.loads(data) if data else None
        assert found is None or isinstance(found, dict)
        return found

    def put(self, path: str, data: Any) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(data))


@dataclasses.dataclass
class Torch211:
    """The modules of one torch 2.11 process."""

    records: Any
    heuristics: Any
    root: Path

    def config(self, *, warps: int = 4, **blocks: int) -> Any:
        return self.heuristics.Config(dict(blocks), num_warps=warps, num_stages=1)

    def kernel_file(self, root: Path | None = None) -> str:
        return str((root or self.root) / "inductor" / "ab" / "cabc.py")

    def load(self, configs: list[Any], meta: dict[str, Any]) -> tuple[list[Any], Any, dict[str, Any]]:
        """As `cached_autotune` loads a kernel from source."""
        found: tuple[list[Any], Any, dict[str, Any]] = self.heuristics.check_autotune_cache(
            configs, self.kernel_file(), meta
        )
        return found

    def restored(self, configs: list[Any], meta: dict[str, Any], root: Path | None = None) -> Any:
        """A kernel as it is after unpickling from a graph that was built at `root`."""
        kernel = self.heuristics.CachingAutotuner()
        kernel.filename, kernel.inductor_meta = self.kernel_file(root), meta
        kernel.compile_results = pickle.loads(pickle.dumps([SimpleNamespace(config=one) for one in configs]))
        kernel.is_statically_launchable = lambda: True
        kernel.autotune_cache_info = None
        return kernel


class Modules:
    """Makes and removes the modules; the class of configs must be found by pickle."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self) -> Torch211:
        records = self.module("autotune_cache")
        heuristics = self.module("triton_heuristics")
        for module in (records, heuristics):
            module.Config = heuristics.Config
        heuristics.AutotuneCache = records.AutotuneCache
        return Torch211(records, heuristics, self.root)

    def module(self, name: str) -> Any:
        module: Any = ModuleType(f"torch211_{name}")
        sys.modules[module.__name__] = module
        vars(module).update(
            annotations=__import__("__future__").annotations,
            dataclasses=dataclasses, copy=copy, hashlib=hashlib, os=os, logging=logging, Any=Any, Callable=Callable,
            log=logging.getLogger(__name__), HAS_WARP_SPEC=False, LocalAutotuneCache=Files,
            AutotuneCacheBundler=SimpleNamespace(put=lambda *_: None),
            AutotuneCacheArtifact=SimpleNamespace(type=lambda: "autotune"),
            CacheArtifactManager=SimpleNamespace(record_artifact=lambda *_: None),
            KernelInterface=object, triton_config_to_hashable=hashable, _should_use_remote_autotune_cache=lambda _: False,
            dynamo_timed=None, OrderedSet=dict, HeuristicType=SimpleNamespace(REDUCTION=1),
        )  # fmt: skip
        text = (FIXTURES / f"{name}.txt").read_text()
        exec(compile(f"from __future__ import annotations\n{text}", str(FIXTURES / name), "exec"), vars(module))
        return module

    def remove(self) -> None:
        for name in [name for name in sys.modules if name.startswith("torch211_")]:
            del sys.modules[name]


def hashable(config: Any) -> Any:
    return (*sorted(config.kwargs.items()), config.num_warps, config.num_stages)


@pytest.fixture
def torch211(tmp_path: Path) -> Iterator[Torch211]:
    modules = Modules(tmp_path / "root")
    made = modules.make()
    # torch's own hash its sources and ask its configuration: names of record files, nothing that is patched
    made.records.AutotuneCache._prepare_key = staticmethod(os.path.basename)
    made.records.AutotuneCache._setup_local_cache = setup_local_cache
    yield made
    modules.remove()


def setup_local_cache(self: Any, meta: dict[str, Any], folder: str, name: str) -> None:
    self.local_cache = (Files(), f"{folder}/{hashlib.sha256(name.encode()).hexdigest()}.best_config")


def applied(made: Torch211, *names: str) -> Torch211:
    for row in backports.TABLE:
        if row.name in names:
            row.patch(made.records if row.module.endswith("autotune_cache") else made.heuristics, str(made.root))
    return made


ALL = ("tuning-record", "record-path", "scaled-winner", "single-record", "recorded-block")


def tuned(made: Torch211, candidates: list[Any], winner: Any, meta: dict[str, Any], by_descent: bool = False) -> None:
    """Leaves the record of a finished tuning, as the process that tuned wrote it."""
    made.records.AutotuneCache.create(meta, made.kernel_file(), made.heuristics.hash_configs(candidates)).save(
        winner, 10**9, found_by_coordesc=by_descent
    )


def chosen(kernel: Any) -> tuple[list[Any], bool]:
    configs = [result.config for result in kernel.compile_results]
    return list(map(hashable, configs)), getattr(configs[0], "found_by_coordesc", False)


def scaled(kernel: Any) -> bool:
    """Tells whether torch would add a config with half the block to a kernel: by then it asks for the deterministic mode."""
    asked: list[str] = []
    kernel.__class__ = type("Probe", (type(kernel),), {"__getattr__": lambda _, name: asked.append(name) or 1 / 0})
    kernel.device_props = None
    try:
        kernel._dynamic_scale_rblock()
    except ZeroDivisionError:
        pass
    return "deterministic_mode" in asked


def test_plain_torch_passes_over_the_record_of_a_settled_kernel(torch211: Torch211) -> None:
    candidates = [torch211.config(XBLOCK=32), torch211.config(XBLOCK=64)]
    tuned(torch211, candidates, candidates[1], DESCENT, by_descent=True)
    kernel = torch211.restored([torch211.config(XBLOCK=64)], DESCENT)
    kernel.recheck_autotune_cache(None)
    assert chosen(kernel)[1] is False


def test_the_record_ends_the_tuning_of_a_restored_kernel_with_its_mark_at_the_live_path(torch211: Torch211) -> None:
    applied(torch211, *ALL)
    candidates = [torch211.config(XBLOCK=32), torch211.config(XBLOCK=64)]
    tuned(torch211, candidates, candidates[1], DESCENT, by_descent=True)
    kernel = torch211.restored([torch211.config(XBLOCK=64)], DESCENT, Path("/builder"))
    kernel.recheck_autotune_cache(None)
    assert chosen(kernel) == ([hashable(candidates[1])], True)
    assert kernel.filename == torch211.kernel_file()
    assert not scaled(kernel)


def test_a_kernel_from_source_finds_the_same_record_as_in_plain_torch(torch211: Torch211) -> None:
    candidates = [torch211.config(XBLOCK=32), torch211.config(XBLOCK=64)]
    tuned(torch211, candidates, candidates[1], META)
    plain = torch211.load([copy.deepcopy(one) for one in candidates], META)
    ported = applied(torch211, *ALL).load([copy.deepcopy(one) for one in candidates], META)
    assert list(map(hashable, plain[0])) == list(map(hashable, ported[0])) == [hashable(candidates[1])]
    assert plain[2] == ported[2]


def test_one_record_serves_a_restored_kernel_and_the_same_one_from_source_for_a_shape_that_was_not_built(
    torch211: Torch211,
) -> None:
    applied(torch211, *ALL)
    candidates = [torch211.config(XBLOCK=32), torch211.config(XBLOCK=64)]
    tuned(torch211, candidates, candidates[1], DESCENT, by_descent=True)
    (path,) = torch211.root.rglob("*.best_config")
    record = path.read_bytes()
    for _ in range(2):
        kernel = torch211.restored([torch211.config(XBLOCK=64)], DESCENT, Path("/builder"))
        kernel.recheck_autotune_cache(None)
        assert chosen(kernel) == ([hashable(candidates[1])], True)
        configs, _, info = torch211.load(candidates, DESCENT)
        assert list(map(hashable, configs)) == [hashable(candidates[1])] and configs[0].found_by_coordesc
        assert info["autotune_cache_state"] == "hit"
    assert path.read_bytes() == record and list(torch211.root.rglob("*.best_config")) == [path]


@pytest.mark.parametrize("is_ported", [False, True])
def test_a_winner_with_half_the_block_is_accepted_from_its_record(torch211: Torch211, is_ported: bool) -> None:
    candidates = [torch211.config(XBLOCK=1, R0_BLOCK=2048), torch211.config(XBLOCK=8, R0_BLOCK=512)]
    winner = torch211.config(XBLOCK=1, R0_BLOCK=1024)
    tuned(torch211, candidates, winner, META)
    if is_ported:
        applied(torch211, *ALL)
    configs, _, info = torch211.load(candidates, META)
    wanted = [hashable(winner)] if is_ported else list(map(hashable, candidates))
    assert list(map(hashable, configs)) == wanted
    assert info["autotune_cache_state"] == ("hit" if is_ported else "miss")


def test_a_kernel_without_x_dimension_finds_its_record(torch211: Torch211) -> None:
    candidates = [torch211.config(XBLOCK=1, R0_BLOCK=2048), torch211.config(XBLOCK=1, R0_BLOCK=1024)]
    tuned(torch211, candidates, torch211.config(R0_BLOCK=1024), META)
    configs, _, _ = applied(torch211, *ALL).load(candidates, META)
    assert list(map(hashable, configs)) == [hashable(candidates[1])]


@pytest.mark.parametrize("changed", ["configs_hash", "num_warps", "R0_BLOCK"])
def test_a_record_of_other_candidates_or_with_other_fields_is_passed_over(torch211: Torch211, changed: str) -> None:
    candidates = [torch211.config(XBLOCK=1, R0_BLOCK=2048), torch211.config(XBLOCK=8, R0_BLOCK=512)]
    tuned(torch211, candidates, torch211.config(XBLOCK=1, R0_BLOCK=1024), META)
    (path,) = torch211.root.rglob("*.best_config")
    record = json.loads(path.read_text())
    if changed == "configs_hash":
        record[changed] = "other"
    else:
        del record[changed]
    path.write_text(json.dumps(record))
    configs, _, _ = applied(torch211, *ALL).load(candidates, META)
    assert list(map(hashable, configs)) == list(map(hashable, candidates))


def test_a_kernel_with_one_config_keeps_no_record_in_plain_torch_and_one_with_the_back_port(torch211: Torch211) -> None:
    alone, half = torch211.config(XBLOCK=1, R0_BLOCK=2048), torch211.config(XBLOCK=1, R0_BLOCK=1024)
    assert torch211.load([alone], META)[1] is None
    _, cache, info = applied(torch211, *ALL).load([alone], META)
    assert info["autotune_cache_state"] == "only 1 config"
    cache.save(half, 10**9)
    configs, _, info = torch211.load([alone], META)
    assert list(map(hashable, configs)) == [hashable(half)] and info["autotune_cache_state"] == "hit"
    kernel = torch211.restored([half], META)
    kernel.recheck_autotune_cache(None)
    assert not scaled(kernel)


DAMAGES = (b"", b"{", b'{"XBLOCK": 64', b"\xff", b"null", b"[1]", b"7", b'"x"', b"[" * 100_000)


def damaged(made: Torch211, data: bytes | None) -> None:
    """Puts other bytes, or a folder, in the place of every record."""
    for path in made.root.rglob("*.best_config"):
        path.unlink()
        path.mkdir() if data is None else path.write_bytes(data)


@pytest.mark.parametrize("data", [*DAMAGES, None])
def test_a_damaged_record_is_none_and_no_fault_of_the_service(torch211: Torch211, data: bytes | None) -> None:
    candidates = [torch211.config(XBLOCK=32), torch211.config(XBLOCK=64)]
    tuned(torch211, candidates, candidates[1], DESCENT, by_descent=True)
    damaged(torch211, data)
    applied(torch211, *ALL)
    for configs in (candidates[:1], candidates):
        kernel = torch211.restored(configs, DESCENT)
        kernel.recheck_autotune_cache(None)
        assert chosen(kernel) == (list(map(hashable, configs)), False)
        found, cache, info = torch211.load(configs, META)
        assert list(map(hashable, found)) == list(map(hashable, configs))
        assert cache is not None or len(configs) == 1
        assert info["autotune_cache_state"] != "hit"


@pytest.mark.parametrize("name", ["num_warps", "num_stages"])
def test_a_record_that_lacks_a_launch_option_is_none_and_no_fault_of_the_service(torch211: Torch211, name: str) -> None:
    candidates = [torch211.config(XBLOCK=32), torch211.config(XBLOCK=64)]
    tuned(torch211, candidates, candidates[1], DESCENT, by_descent=True)
    for path in torch211.root.rglob("*.best_config"):
        record = json.loads(path.read_bytes())
        assert record.pop(name) and record["found_by_coordesc"]
        path.write_text(json.dumps(record))
    applied(torch211, *ALL)
    for configs in (candidates[:1], candidates):
        found, _, info = torch211.load(configs, DESCENT)
        assert list(map(hashable, found)) == list(map(hashable, configs))
        assert info["autotune_cache_state"] != "hit"


def test_torch_2_11_itself_passes_over_a_damaged_record_of_a_settled_kernel_alone(torch211: Torch211) -> None:
    candidates = [torch211.config(XBLOCK=32), torch211.config(XBLOCK=64)]
    tuned(torch211, candidates, candidates[1], META)
    damaged(torch211, b"{")
    torch211.restored(candidates[:1], META).recheck_autotune_cache(None)
    with pytest.raises(json.JSONDecodeError):
        torch211.restored(candidates, META).recheck_autotune_cache(None)


@pytest.mark.parametrize("reason", ["caches are disabled", "no file", "interpreted"])
def test_nothing_is_recorded_where_torch_may_not_or_has_no_file(
    torch211: Torch211, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    meta = {**META, "force_disable_caches": reason == "caches are disabled"}
    file = None if reason == "no file" else torch211.kernel_file()
    if reason == "interpreted":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    alone = torch211.config(XBLOCK=1)
    check = applied(torch211, *ALL).heuristics.check_autotune_cache
    assert check([alone], file, meta)[1] is None
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert check([alone], torch211.kernel_file(), META)[1] is not None


def test_a_kernel_without_record_is_scaled_as_in_plain_torch(torch211: Torch211) -> None:
    alone = torch211.config(XBLOCK=1, R0_BLOCK=2048)
    assert scaled(torch211.restored([alone], META))
    applied(torch211, *ALL)
    kernel = torch211.restored([alone], META)
    kernel.recheck_autotune_cache(None)
    assert scaled(kernel)
    assert chosen(kernel) == ([hashable(alone)], False)


def test_a_record_is_written_below_the_live_folder_though_the_pickle_names_the_builders(torch211: Torch211) -> None:
    builder = torch211.root.parent / "builder"
    built = torch211.records.AutotuneCache.create(META, torch211.kernel_file(builder), "hash")
    restored = pickle.loads(pickle.dumps(built.save)).__self__
    applied(torch211, "record-path")
    restored.save(torch211.config(XBLOCK=64), 10**9)
    assert not builder.exists()
    (path,) = torch211.root.rglob("*.best_config")
    assert path.parent == Path(torch211.kernel_file()).parent
    assert json.loads(path.read_text())["XBLOCK"] == 64


def test_the_save_hook_of_a_kernel_pickles_with_the_back_port_and_without(torch211: Torch211) -> None:
    hook = applied(torch211, *ALL).records.AutotuneCache.create(META, torch211.kernel_file(), "hash").save
    assert hook.__name__ == "save"
    assert pickle.loads(pickle.dumps(hook)).__self__.configs_hash == "hash"


@pytest.mark.parametrize("variable", ["true", "1", "", None])
def test_a_key_part_that_follows_ci_is_as_builders_have_it(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if variable is not None:
        monkeypatch.setenv("CI", variable)
    module = ModuleType("torch211_config")
    vars(module)["os"] = os
    exec((FIXTURES / "functorch_config.txt").read_text(), vars(module))
    before = dict(vars(module))
    assert before["error_on_custom_op_aliasing"] is bool(variable)
    (row,) = [row for row in backports.TABLE if row.name == "custom-op-aliasing"]
    row.patch(module, "/nonexistent")
    assert vars(module) == {**before, "error_on_custom_op_aliasing": False}
