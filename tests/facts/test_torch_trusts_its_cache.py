"""Facts about torch that cachepipe is built on (M1-M12): torch gives its compile cache no protection, and says so.

They are no promises of ours. One that fails says that torch has changed: then a defence may be superfluous, or a new one
needed. Measured with torch 2.13.0 (CPU build). Each runs in a child process: a fact may well end it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.release import clean_environment

pytestmark = pytest.mark.nightly

PRELUDE = """
import json, os, pathlib, pickle, sys
out = pathlib.Path(sys.argv[1])
class Plant:
    def __reduce__(self):
        return (open, (str(out / "ran"), "w"))
import torch
"""
COMPILE = """
def f(x):
    return (x @ x).sum() + torch.nn.functional.gelu(x).sum()
torch.compile(f)(torch.ones(8, 8))
"""


def child(folder: Path, code: str, *, cache: Path | None = None, timeout_s: float = 120, **env: str) -> Any:
    """Runs code in a fresh process and returns (exit code, last line of stdout as JSON or text, stderr)."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    given = clean_environment(TORCHINDUCTOR_CACHE_DIR=str(cache or folder / "cache"), **env)
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], env=given, cwd="/", capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    return done.returncode, (done.stdout.strip().splitlines() or [""])[-1], done.stderr


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    """A bundle of `save_cache_artifacts`, and the cache folder that it was saved from."""
    folder = tmp_path_factory.mktemp("bundle")
    code = COMPILE + "data, info = torch.compiler.save_cache_artifacts()\n(out / 'bundle').write_bytes(data)\n"
    status, _, err = child(folder, code)
    assert status == 0, err
    return (folder / "bundle").read_bytes(), folder / "cache"


LOAD = """
try:
    info = torch.compiler.load_cache_artifacts((out / "bad").read_bytes())
    print("loaded" if info is not None else "refused")
except BaseException as error:
    print("raised", type(error).__name__)
"""


def load(folder: Path, data: bytes, **how: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "bad").write_bytes(data)
    return str(child(folder, LOAD, **how)[1])


REBUILD = """
from torch.compiler._cache import CacheArtifactManager, CacheArtifactFactory, CacheArtifactsResult
import torch._inductor.codecache, torch._functorch._aot_autograd.autograd_cache, torch._inductor.runtime.autotune_cache
parts = CacheArtifactManager.deserialize((out / "good").read_bytes())
made = {}
for kind, items in parts.items():
    made[kind] = [type(item)(*change(kind, item.key, item.content)) for item in items]
for kind, key, content in extra:
    made.setdefault(kind, []).append(CacheArtifactFactory.create(kind, key, content))
from torch.utils._appending_byte_serializer import AppendingByteSerializer
writer = AppendingByteSerializer(serialize_fn=torch.compiler._cache._serialize_single_cache)
for kind, items in made.items():
    writer.append((kind, items))
(out / "bad").write_bytes(writer.to_bytes())
"""


def rebuilt(folder: Path, data: bytes, change: str, extra: str = "()") -> bytes:
    """Returns the bundle with items changed by an expression over (kind, key, content), checksum made anew."""
    folder.mkdir(exist_ok=True)
    (folder / "good").write_bytes(data)
    code = f"change = lambda kind, key, content: ({change})\nextra = {extra}\n{REBUILD}"
    status, _, err = child(folder, code)
    assert status == 0, err
    return (folder / "bad").read_bytes()


def test_m1_a_foreign_pickle_in_a_bundle_runs_while_it_is_loaded(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    data = rebuilt(tmp_path / "make", bundle[0], 'key, pickle.dumps(Plant()) if kind == "inductor" else content')
    (tmp_path / "load").mkdir()
    bad = data.replace(str(tmp_path / "make").encode(), str(tmp_path / "load").encode())
    load(tmp_path / "load", bad)
    assert (tmp_path / "load" / "ran").exists() or (tmp_path / "make" / "ran").exists()


def test_m2_a_key_with_dots_is_written_outside_the_cache_folder(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    extra = '[("autotune", "../../escaped.best_config", b"{}")]'
    data = rebuilt(tmp_path / "make", bundle[0], "key, content", extra)
    assert load(tmp_path / "load", data) in ("loaded", "refused")
    assert list(tmp_path.rglob("escaped*")) or list(tmp_path.parent.glob("escaped*"))


def test_m4_m5_the_checksum_finds_accidents_and_stops_no_one(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    from torch.utils._appending_byte_serializer import BytesReader  # noqa: F401 - where the format is defined

    data = bytearray(bundle[0])
    data[len(data) // 2] ^= 1
    assert load(tmp_path / "flip", bytes(data)) in ("refused", "raised RuntimeError")
    whole = bundle[0]
    checksum = zlib.crc32(whole[16:] if int.from_bytes(whole[:8], "big") == 1 else whole)
    assert checksum != 0  # CRC-32: linear, without any key


def test_m7_an_invalid_pickle_raises_into_the_caller(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    data = rebuilt(tmp_path / "make", bundle[0], 'key, b"no pickle" if kind == "inductor" else content')
    assert load(tmp_path / "load", data).startswith("raised")


def test_m8_an_extra_file_in_a_keys_folder_is_unpickled_at_lookup(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    import shutil

    cache = tmp_path / "cache"
    shutil.copytree(bundle[1], cache)
    plant = f"pathlib.Path({str(cache)!r})"
    code = f"""
    for folder in [*{plant}.glob('fxgraph/*/*'), *{plant}.glob('aotautograd/*')]:
        for number in range(20):  # torch takes the first that fits, in the order of the folder
            (folder / str(number)).write_bytes(pickle.dumps(Plant()))
    """
    code = textwrap.dedent(code)
    child(tmp_path / "run", code + COMPILE, cache=cache)
    assert (tmp_path / "run" / "ran").exists()


@pytest.mark.parametrize("damage", ["empty", "half"])
def test_m9_a_damaged_file_of_the_tree_is_no_error_that_torch_names(
    tmp_path: Path, bundle: tuple[bytes, Path], damage: str
) -> None:
    import shutil

    outcomes = {}
    for number, suffix in enumerate((".so", ".main.so", "graph")):
        found = [
            p for p in bundle[1].rglob("*") if p.is_file() and (p.name.endswith(suffix) or suffix in str(p.parent))
        ]
        if not found:
            continue
        cache = tmp_path / f"cache{number}"
        shutil.copytree(bundle[1], cache)
        victim = cache / found[0].relative_to(bundle[1])
        data = victim.read_bytes()
        victim.write_bytes(b"" if damage == "empty" else data[: len(data) // 2])
        outcomes[suffix] = child(tmp_path / f"run{number}", COMPILE + "print('called')", cache=cache)[0]
    assert outcomes
    # Some damages become misses and some end the process: which is why every file is checked before a service starts.
    assert set(outcomes.values()) <= {0, 1, -4, -6, -7, -11}


def test_m10_a_cache_folder_that_everyone_can_write_is_used_without_complaint(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    status, _, err = child(tmp_path / "run", COMPILE, cache=cache)
    assert status == 0
    assert "777" not in err
    assert any(cache.iterdir())


def test_m12_a_folder_that_another_process_filled_gives_hits(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    code = COMPILE + "from torch._dynamo.utils import counters\nprint(json.dumps(dict(counters['aot_autograd'])))"
    status, line, err = child(tmp_path / "run", code, cache=bundle[1])
    assert status == 0, err
    assert json.loads(line).get("autograd_cache_hit", 0) >= 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_m11_a_read_only_tree_fails_the_first_call(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    for path in (*bundle[1].rglob("*"), bundle[1]):
        path.chmod(path.stat().st_mode & ~0o222)
    assert child(tmp_path / "run", COMPILE, cache=bundle[1])[0] != 0
