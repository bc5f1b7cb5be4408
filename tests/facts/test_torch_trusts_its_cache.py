"""Facts about torch that cachepipe is built on (M1-M12): torch gives its compile cache no protection, and says so.

They are no promises of ours. One that fails says that torch has changed: then a defence may be superfluous, or a new one
needed. Measured with torch 2.13.0 (CPU build). Each runs in a child process: a fact may well end it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.release import clean_environment
from tests.support.users import as_other_user, give_to_other_user

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

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


def child(folder: Path, code: str, *, cache: Path | None = None, wrap: Any = list, **env: str) -> Any:
    """Runs code in a fresh process and returns (exit code, last line of stdout, stderr)."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    given = clean_environment(TORCHINDUCTOR_CACHE_DIR=str(cache or folder / "cache"), **env)
    done = subprocess.run(
        wrap([sys.executable, str(script), str(folder)]),
        env=given,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
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


def mended(data: bytes) -> bytes:
    """Returns a bundle with its checksum made anew: CRC-32 has no key."""
    return zlib.crc32(data[4:]).to_bytes(4, "big") + data[4:]


REBUILD = """
from torch.compiler._cache import CacheArtifactManager, CacheArtifactFactory, CacheArtifactsResult
import torch._inductor.codecache, torch._functorch._aot_autograd.autograd_cache, torch._inductor.runtime.autotune_cache
parts = CacheArtifactManager.deserialize((out / "good").read_bytes())
made = {kind: [CacheArtifactFactory.create(kind, key, content)] for kind, key, content in extra}  # loaded first
for kind, items in parts.items():
    made.setdefault(kind, []).extend(type(item)(*change(kind, item.key, item.content)) for item in items)
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
    assert not (tmp_path / "make/ran").exists()
    assert load(tmp_path / "load", data).startswith("raised")
    assert (tmp_path / "make/ran").exists()  # the place that the pickle names


@pytest.mark.parametrize("key", ["../../escaped", "{folder}/escaped"], ids=["dots", "absolute"])
def test_m2_a_key_is_written_outside_the_cache_folder_and_reported_as_loaded(
    tmp_path: Path, bundle: tuple[bytes, Path], key: str
) -> None:
    key = key.format(folder=tmp_path)
    data = rebuilt(tmp_path / "make", bundle[0], "key, content", f'[("autotune", {key!r}, b"{{}}")]')
    (tmp_path / "load").mkdir()
    assert load(tmp_path / "load", data, cache=tmp_path / "load/deep/cache") == "loaded"
    written = [path for path in tmp_path.rglob("*") if path.name.startswith("escaped")]
    assert written
    assert not any(path.is_relative_to(tmp_path / "load/deep/cache") for path in written)


READ = """
import collections, logging, random, signal, zlib
from torch.compiler._cache import CacheArtifactManager
class Hung(BaseException):
    pass
def hung(*_):
    raise Hung
signal.signal(signal.SIGVTALRM, hung)
logging.disable()
good = (out / "good").read_bytes()
def outcome(data, read=CacheArtifactManager.deserialize):
    signal.setitimer(signal.ITIMER_VIRTUAL, 1)  # of its own processor time, whatever else the machine does
    try:
        return "refused" if read(data) is None else "accepted"
    except Hung:
        return "hung"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
def flips(count, first_bytes, is_mended):
    chance, found = random.Random(0), collections.Counter()
    for _ in range(count):
        bit = chance.randrange(4 * 8, first_bytes * 8)  # behind the checksum
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        if is_mended:
            data[:4] = zlib.crc32(data[4:]).to_bytes(4, "big")
        found[outcome(bytes(data))] += 1
    print(json.dumps(found))
assert CacheArtifactManager.deserialize(good)  # whatever is imported late is here from now on
"""


def outcomes(folder: Path, data: bytes, code: str) -> Any:
    """Returns what a reader of bundles makes of changed ones: the last line of the code after `READ`."""
    folder.mkdir(exist_ok=True)
    (folder / "good").write_bytes(data)
    status, line, err = child(folder, READ + code)
    assert status == 0, err
    return json.loads(line)


def test_m3_a_length_beyond_the_end_holds_the_load_call_for_ever(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    bad = mended(bytes(4) + (1).to_bytes(8, "big") + (1 << 62).to_bytes(8, "big"))
    assert len(bad) == 20
    code = f"torch.compiler.load_cache_artifacts(good)\nprint(json.dumps(outcome({bad!r}, torch.compiler.load_cache_artifacts)))"
    assert outcomes(tmp_path / "run", bundle[0], code) == "hung"


def test_m4_a_thousand_flipped_bits_are_all_found_by_the_checksum(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    assert outcomes(tmp_path / "run", bundle[0], "flips(1000, len(good), False)") == {"refused": 1000}


def test_m5_under_a_new_checksum_nearly_all_of_them_are_accepted(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    found = outcomes(tmp_path / "run", bundle[0], "flips(1000, len(good), True)")
    assert found["accepted"] >= 990
    assert sum(found.values()) == 1000


def test_m6_flips_in_the_first_bytes_hang_the_reader_or_are_accepted(
    tmp_path: Path, bundle: tuple[bytes, Path]
) -> None:
    found = outcomes(tmp_path / "run", bundle[0], "flips(60, 96, True)")
    assert set(found) == {"hung", "accepted", "refused"}
    assert found["hung"] >= 5
    assert found["accepted"] >= 5


def test_m7_an_invalid_pickle_raises_into_the_caller_after_others_were_written(
    tmp_path: Path, bundle: tuple[bytes, Path]
) -> None:
    change = 'key, b"no pickle" if kind == "inductor" else content'
    data = rebuilt(tmp_path / "make", bundle[0], change, '[("autotune", "early", b"{}")]')
    assert load(tmp_path / "load", data).startswith("raised")
    assert [path for path in (tmp_path / "load/cache").rglob("*") if path.name.startswith("early")]


@pytest.mark.parametrize(("place", "is_fatal"), [("fxgraph/*/*", True), ("aotautograd/*", False)], ids=["fx", "aot"])
def test_m8_an_extra_file_in_a_keys_folder_is_unpickled_at_lookup(
    tmp_path: Path, bundle: tuple[bytes, Path], place: str, is_fatal: bool
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(bundle[1], cache)
    if is_fatal:  # the outer cache answers first
        shutil.rmtree(cache / "aotautograd")
    code = f"""
    for folder in pathlib.Path({str(cache)!r}).glob({place!r}):
        for number in range(20):  # torch takes the first that fits, in the order of the folder
            (folder / str(number)).write_bytes(pickle.dumps(Plant()))
    """
    status, line, err = child(tmp_path / "run", textwrap.dedent(code) + COMPILE + "print('called')", cache=cache)
    assert (tmp_path / "run/ran").exists()
    assert (status != 0, line == "called") == (is_fatal, not is_fatal), err


def test_m9_a_damaged_file_of_the_tree_ends_some_services_and_others_not(
    tmp_path: Path, bundle: tuple[bytes, Path]
) -> None:
    """Which is why every file is checked before a service starts."""
    files = [path.relative_to(bundle[1]) for path in sorted(bundle[1].rglob("*")) if path.is_file()]
    victims = [path for path in files if path.suffix == ".so" or path.parts[0] in ("fxgraph", "aotautograd")]
    statuses = {}
    for path in victims:
        for damage in ("empty", "half"):
            name = f"{len(statuses)}"
            cache = tmp_path / f"cache{name}"
            shutil.copytree(bundle[1], cache)
            data = (cache / path).read_bytes()
            (cache / path).write_bytes(b"" if damage == "empty" else data[: len(data) // 2])
            statuses[f"{path} {damage}"] = child(tmp_path / f"run{name}", COMPILE, cache=cache)[0]
    assert 0 in statuses.values(), statuses  # a miss, or a hit on something else
    assert any(statuses.values()), statuses


def test_m10_a_cache_folder_that_everyone_can_write_is_used_without_complaint(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    status, _, err = child(tmp_path / "run", COMPILE, cache=cache)
    assert (status, [line for line in err.splitlines() if str(cache) in line]) == (0, [])
    assert any(cache.iterdir())


def test_m12_a_folder_that_another_process_filled_gives_hits(tmp_path: Path, bundle: tuple[bytes, Path]) -> None:
    code = COMPILE + "from torch._dynamo.utils import counters\nprint(json.dumps(dict(counters['aot_autograd'])))"
    status, line, err = child(tmp_path / "run", code, cache=bundle[1])
    assert status == 0, err
    assert json.loads(line).get("autograd_cache_hit", 0) >= 1


def test_m11_a_read_only_tree_fails_the_first_call(bundle: tuple[bytes, Path]) -> None:
    with tempfile.TemporaryDirectory(prefix="cachepipe-facts-") as name:  # pytest's own folders are closed to others
        base = Path(name)
        base.chmod(0o755)
        shutil.copytree(bundle[1], base / "cache")
        (base / "run").mkdir()
        for path in (*base.rglob("*"),):
            give_to_other_user(path)
        for path in (*(base / "cache").rglob("*"), base / "cache"):
            path.chmod(path.stat().st_mode & ~0o222)
        status, _, err = child(base / "run", COMPILE, cache=base / "cache", wrap=as_other_user, HOME=str(base / "run"))
        assert status != 0
        assert "PermissionError" in err
