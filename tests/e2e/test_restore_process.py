"""`cachepipe restore` as services run it: real processes, a small artifact in a folder store, no torch."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from cachepipe.adapters.lease import Lease
from cachepipe.domain.fingerprint import Part
from cachepipe.domain.layout import hint_key, index_key
from cachepipe.workflows.fetch import read_channel
from tests.support.restoring import (
    PRINT_ENVIRONMENT,
    REPOSITORY,
    Published,
    Ran,
    command,
    environment,
    files_below,
    publish_release,
    restore_words,
    run_restore,
    service_environment,
    tree_files,
)
from tests.support.silent_store import URL, silent_store
from tests.support.users import OTHER_ID, as_other_user, give_to_other_user

FOREIGN = 65534
HEAVY = ("torch", "pydantic", "boto3", "botocore", "rich", "securesystemslib", "click", "yaml", "jinja2", "asyncio")


@pytest.fixture
def demo(tmp_path: Path) -> Published:
    return publish_release(tmp_path)


def words(release: Published, *more: str) -> tuple[str, ...]:
    return (release.store.url, "--name", release.name, *more)


# --- the way of a service ----------------------------------------------------------------------------------------------


def test_a_service_starts_with_the_restored_folder(tmp_path: Path, demo: Published) -> None:
    ran = run_restore(tmp_path, *words(demo), *command())
    assert ran.code == 0, ran.err
    assert files_below(demo.root) == demo.restored_bytes(demo.root)
    found, index = (
        service_environment(ran),
        read_channel(demo.store, "demo", "stable", datetime.now(timezone.utc)).index,
    )
    wanted = {
        "TORCHINDUCTOR_CACHE_DIR": f"{demo.root}/inductor",
        "TRITON_CACHE_DIR": f"{demo.root}/triton/0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "CACHEPIPE_ATTACH": "1",
        "CACHEPIPE_ROOT": demo.root,
        "CACHEPIPE_RESTORED": demo.row.statement,
        "CACHEPIPE_STATE_DIR": f"{os.path.dirname(demo.root)}/.state",
        "CACHEPIPE_START_ID": ran.line["start"],
        "CACHEPIPE_INDEX_DATES": "/".join((index.created_at, index.expires_at)),
    }
    assert {name: found[name] for name in wanted} == wanted
    assert set(found) - set(environment(tmp_path)) - {"LC_CTYPE"} == set(wanted)
    assert stat.S_IMODE(os.stat(demo.root).st_mode) == 0o700
    (statement,) = Path(demo.root, ".cachepipe/statements").iterdir()
    assert statement.name == f"{demo.row.statement}.json"
    assert json.loads(statement.read_bytes())["predicate"]["release"] == "demo"


def test_the_environment_of_the_service_holds_nothing_that_the_interpreter_added(
    tmp_path: Path, demo: Published
) -> None:
    ran = run_restore(tmp_path, *words(demo), *command(["/usr/bin/env"]))
    assert "LC_CTYPE=" not in ran.out


def test_no_attach_leaves_the_service_alone(tmp_path: Path, demo: Published) -> None:
    ran = run_restore(tmp_path, *words(demo, "--no-attach"), *command())
    assert "CACHEPIPE_ATTACH" not in service_environment(ran)


def test_case_l2_every_start_says_one_line(tmp_path: Path, demo: Published) -> None:
    first = run_restore(tmp_path, *words(demo), *command(["true"]))
    again = run_restore(tmp_path, *words(demo), *command(["true"]))
    cold = run_restore(tmp_path, demo.store.url, "--name", "absent", *command(["true"]))
    assert [ran.err.count("\n") for ran in (first, again, cold)] == [1, 1, 1]
    line = first.line
    assert (line["outcome"], line["name"], line["digest"]) == ("restored", "demo", demo.row.statement)
    assert (line["trust"], line["folder"]) == ("development key", demo.root)
    assert int(line["bytes"]) == demo.row.packs_bytes + demo.row.size_bytes
    assert 0 < float(line["seconds"]) < 30
    assert (again.line["outcome"], again.line["bytes"]) == ("present", "0")
    assert cold.line["outcome"] == "cold"
    assert "nothing is published: absent@stable" in cold.line["reason"]
    assert cold.line["hint"]


def test_heavy_libraries_are_not_imported_before_exec(tmp_path: Path, demo: Published) -> None:
    hook = (
        "import os, sys\n"
        "def hook(event, args):\n"
        "    if event == 'os.exec' and args[0].endswith('true'):\n"
        f"        open({str(tmp_path / 'modules')!r}, 'a').write(' '.join(sys.modules) + '\\n')\n"
        "sys.addaudithook(hook)\n"
    )
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(hook)
    env = environment(tmp_path, PYTHONPATH=f"{tmp_path / 'hook'}:{REPOSITORY}")
    for more in ((), (), ("--lock", demo.lock)):
        run_restore(tmp_path, *words(demo, *more), *command(["/bin/true"]), env=env)
    full, channel, lock = (set(line.split()) for line in (tmp_path / "modules").read_text().splitlines())
    for loaded in (full, channel, lock):
        assert not loaded & set(HEAVY)
    assert {"zstandard", "cryptography.hazmat.primitives.asymmetric.ec"} <= full
    needless = {
        "_strptime",
        "cachepipe.domain.evidence",
        "cachepipe.adapters.cachetree",
    }  # 5 ms each, with what they import
    assert not full & {
        *needless,
        "cryptography.hazmat.primitives.ciphers",
        "cryptography.hazmat.primitives.serialization",
    }
    assert not lock & {"zstandard", "cachepipe.adapters.store", "cachepipe.workflows.restore", "shutil", "subprocess"}


# --- present -----------------------------------------------------------------------------------------------------------


def test_with_a_lock_a_second_start_needs_no_store(tmp_path: Path, demo: Published) -> None:
    assert run_restore(tmp_path, *words(demo, "--lock", demo.lock), *command(["true"])).line["outcome"] == "restored"
    shutil.rmtree(tmp_path / "store")
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock), *command())
    assert (ran.line["outcome"], service_environment(ran)["CACHEPIPE_ROOT"]) == ("present", demo.root)


def test_a_lock_names_the_release(tmp_path: Path, demo: Published) -> None:
    ran = run_restore(tmp_path, demo.store.url, "--lock", demo.lock, *command(["true"]))
    assert (ran.line["outcome"], ran.line["name"]) == ("restored", "demo")


def test_in_the_default_folder_a_channel_is_present_after_two_requests(tmp_path: Path, demo: Published) -> None:
    dest = str(tmp_path / "baked")
    assert run_restore(tmp_path, *words(demo, "--dest", dest)).line["outcome"] == "restored"
    shutil.rmtree(tmp_path / "store/v1/artifacts")
    (tmp_path / "store" / index_key("demo", "stable", 1)).unlink()
    assert (tmp_path / "store" / hint_key("demo", "stable")).exists()
    ran = run_restore(tmp_path, *words(demo, "--dest", dest), *command(["true"]))
    assert ran.line["outcome"] == "present"


def test_a_new_index_version_is_followed(tmp_path: Path, demo: Published) -> None:
    dest = ("--dest", str(tmp_path / "baked"))
    run_restore(tmp_path, *words(demo, *dest))
    newer = publish_release(tmp_path, number=1)
    ran = run_restore(tmp_path, *words(demo, *dest), *command(["true"]))
    assert (ran.line["outcome"], ran.line["digest"]) == ("restored", newer.row.statement)
    assert files_below(dest[1]) == newer.restored_bytes(dest[1])


def test_a_folder_with_native_functions_is_replaced_in_its_place(tmp_path: Path) -> None:
    root = str(tmp_path / "cache" / "native")
    for number in range(2):
        files = {**tree_files(root, number), f"engine/key/bucket-{number}.so": b"native %d" % number}
        release = publish_release(tmp_path, "native", number=number, files=files)
        ran = run_restore(tmp_path, *words(release), *command(["true"]))
        assert (ran.line["outcome"], ran.line["folder"]) == ("restored", root), ran.err
        assert files_below(root) == release.restored_bytes(root)


def test_a_newer_version_does_not_pull_the_folder_from_under_a_service(tmp_path: Path, demo: Published) -> None:
    with subprocess.Popen(
        restore_words(*words(demo), "--", "/bin/sh", "-c", "echo ready; read line"),
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"ready\n"
        newer = publish_release(tmp_path, number=1)
        ran = run_restore(tmp_path, *words(newer), *command())
        assert files_below(demo.root) == demo.restored_bytes(demo.root)
        service.communicate(b"\n")
    folder = service_environment(ran)["CACHEPIPE_ROOT"]
    assert folder == f"{demo.root}.{newer.row.statement[:12]}"
    assert files_below(folder) == newer.restored_bytes(folder)
    assert "a running service uses it" in ran.line["reason"]


@pytest.mark.parametrize("harm", ["change", "cut", "gone", "link", "fifo", "marker gone", "marker cut"])
def test_a_harmed_folder_is_made_anew(tmp_path: Path, demo: Published, harm: str) -> None:
    run_restore(tmp_path, *words(demo, "--lock", demo.lock))
    victim = Path(demo.root, "inductor/cd/ccd0.so")
    marker = Path(demo.root, ".cachepipe/marker.json")
    if harm in ("gone", "link", "fifo"):
        victim.unlink()
    {
        "change": lambda: victim.write_bytes(b"\0" * victim.stat().st_size),
        "cut": lambda: os.truncate(victim, 10),
        "gone": lambda: None,
        "link": lambda: victim.symlink_to("/bin/true"),
        "fifo": lambda: os.mkfifo(victim),
        "marker gone": marker.unlink,
        "marker cut": lambda: os.truncate(marker, 100),
    }[harm]()
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock), *command(["true"]))
    assert ran.line["outcome"] == "restored"
    assert files_below(demo.root) == demo.restored_bytes(demo.root)


def test_a_copied_folder_is_present_after_its_bytes_were_compared(tmp_path: Path, demo: Published) -> None:
    dest = tmp_path / "baked"
    run_restore(tmp_path, *words(demo, "--lock", demo.lock, "--dest", str(dest)))
    dest.rename(tmp_path / "layer")
    subprocess.run(["cp", "-r", str(tmp_path / "layer"), str(dest)], check=True)
    shutil.rmtree(tmp_path / "store")
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock, "--dest", str(dest)), *command(["true"]))
    assert ran.line["outcome"] == "present"
    (dest / "inductor/cd/ccd0.py").write_text("print('changed')\n")
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock, "--dest", str(dest)), *command(["true"]))
    assert ran.line["outcome"] == "cold"


def test_a_copy_at_another_path_is_not_present(tmp_path: Path, demo: Published) -> None:
    run_restore(tmp_path, *words(demo, "--lock", demo.lock))
    shutil.copytree(demo.root, tmp_path / "elsewhere")
    dest = str(tmp_path / "elsewhere")
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock, "--dest", dest), *command(["true"]))
    assert ran.line["outcome"] == "restored"
    assert files_below(dest) == demo.restored_bytes(dest)


def test_on_another_host_fingerprints_are_compared_again(tmp_path: Path, demo: Published) -> None:
    run_restore(tmp_path, *words(demo, "--lock", demo.lock))
    other = environment(tmp_path, CUDA_VISIBLE_DEVICES="7")
    shutil.rmtree(tmp_path / "store")
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock), *command(["true"]), env=other)
    assert ran.line["outcome"] == "present"
    one_thread = environment(tmp_path, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MKL_DYNAMIC="false")
    two_threads = {**one_thread, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    outcomes = {
        run_restore(tmp_path, *words(demo, "--lock", demo.lock), *command(["true"]), env=env).line["outcome"]
        for env in (one_thread, two_threads)
    }
    assert "cold" in outcomes


# --- users and folders -------------------------------------------------------------------------------------------------


@pytest.fixture
def other() -> Iterator[Path]:
    """A folder that every user can pass, with `theirs/` and `tmp/` of another user; removed afterwards."""
    base = Path(tempfile.mkdtemp(prefix="cachepipe-test-"))
    base.chmod(0o755)
    for name in ("theirs", "tmp"):
        (base / name).mkdir(mode=0o700)
        give_to_other_user(base / name)
    yield base
    shutil.rmtree(base)


def run_as_other(base: Path, *given: str) -> Ran:
    """Runs a restore under a user id without passwd entry, without HOME and USER."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(base / "tmp")}
    argv = as_other_user(restore_words(*given))
    ran = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr, 0.0)


def test_case_d1_a_user_without_name_and_home_gets_its_cache(other: Path) -> None:
    release = publish_release(other, root=str(other / "theirs/cache/demo"))
    ran = run_as_other(other, *words(release), *command())
    assert ran.line["outcome"] == "restored", ran.err
    assert ran.line["folder"] == release.root
    found = service_environment(ran)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == f"{release.root}/inductor"
    assert not {"HOME", "USER"} & set(found)
    cold = run_as_other(other, "--name", "demo", *command())
    assert service_environment(cold)["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{other}/tmp/cachepipe-{OTHER_ID}/cold.")


def test_case_d2_files_belong_to_the_running_user_with_modes_of_ours(other: Path) -> None:
    release = publish_release(other, root=str(other / "theirs/cache/demo"))
    ran = run_as_other(other, *words(release), *command(["touch", f"{release.root}/inductor/new"]))
    assert (ran.code, ran.line["outcome"]) == (0, "restored")
    owner = (other / "theirs").stat().st_uid
    for place, folders, names in os.walk(release.root):
        facts = [os.stat(os.path.join(place, name)) for name in (*folders, *names)]
        assert {fact.st_uid for fact in facts} <= {owner}
        assert all(fact.st_mode & 0o022 == 0 for fact in facts)


def test_case_d2_a_folder_of_another_user_is_not_used(other: Path) -> None:
    release = publish_release(other, root=str(other / "theirs/cache/demo"))
    run_as_other(other, *words(release))
    os.chown(release.root, FOREIGN, FOREIGN)
    ran = run_as_other(other, *words(release), *command())
    folder = service_environment(ran)["CACHEPIPE_ROOT"]
    assert folder == f"{release.root}.{release.row.statement[:12]}"
    assert "demo: owned by uid" in ran.line["reason"]
    assert files_below(folder) == release.restored_bytes(folder)


def test_case_d3_a_read_only_target_is_left_for_private_scratch(other: Path) -> None:
    release = publish_release(other, root=str(other / "cache/demo"))
    (other / "cache").mkdir()
    give_to_other_user(other / "cache")
    (other / "cache").chmod(0o555)
    ran = run_as_other(other, *words(release), *command())
    folder = service_environment(ran)["CACHEPIPE_ROOT"]
    assert folder == f"{other}/tmp/cachepipe-{OTHER_ID}/demo.{release.row.statement[:12]}"
    assert "cache: not writable" in ran.line["reason"]
    assert files_below(folder) == release.restored_bytes(folder)
    assert folder in (Path(folder) / "triton/0/KEY0/__grp__k.json").read_text()
    again = run_as_other(other, *words(release), *command(["true"]))
    assert (again.line["outcome"], again.line["folder"]) == ("present", folder)
    assert "scratch space" in again.line["reason"]


@pytest.mark.parametrize("pins", [True, False], ids=["lock", "channel"])
def test_a_release_in_scratch_space_comes_home_when_its_folder_can_be_used(tmp_path: Path, pins: bool) -> None:
    release = publish_release(tmp_path)
    home = tmp_path / "home" / "demo"
    home.mkdir(parents=True)
    (home / "mine").write_text("of somebody else")
    (tmp_path / "home").chmod(0o777)  # nor can anything be put beside it
    chosen = words(release, "--dest", str(home), *(("--lock", release.lock) if pins else ()))
    first = run_restore(tmp_path, *chosen, "--", "true")
    assert first.line["outcome"] == "restored" and first.line["folder"].startswith(str(tmp_path / "tmp"))
    again = run_restore(tmp_path, *chosen, "--", "true")
    assert (again.line["outcome"], again.line["folder"]) == ("present", first.line["folder"])
    assert "in scratch space" in again.line["reason"] and "writable by others" in again.line["reason"]

    (tmp_path / "home").chmod(0o700)
    (home / "mine").unlink()
    if pins:  # nothing is lost where the store does not answer
        os.rename(release.store.root, tmp_path / "away")
        alone = run_restore(tmp_path, *chosen, "--", "true")
        assert (alone.line["outcome"], alone.line["folder"]) == ("present", first.line["folder"])
        os.rename(tmp_path / "away", release.store.root)
    moved = run_restore(tmp_path, *chosen, "--", "true")
    assert (moved.line["outcome"], moved.line["folder"]) == ("restored", str(home))
    settled = run_restore(tmp_path, *chosen, "--", "true")
    assert (settled.line["outcome"], settled.line["folder"], settled.line.get("reason")) == ("present", str(home), None)


def test_a_warm_copy_in_scratch_space_is_not_lost_to_a_store_that_hangs(tmp_path: Path) -> None:
    release = publish_release(tmp_path)
    home = tmp_path / "home" / "demo"
    home.mkdir(parents=True)
    (home / "mine").write_text("of somebody else")
    (tmp_path / "home").chmod(0o777)
    chosen = ("--name", "demo", "--lock", release.lock, "--dest", str(home), "--strict")
    first = run_restore(tmp_path, release.store.url, *chosen, "--", "true")
    assert first.line["outcome"] == "restored" and first.line["folder"] != str(home)
    (tmp_path / "home").chmod(0o700)
    (home / "mine").unlink()
    for deadline in ("0.4", "1.2", "30"):  # shorter than a look at home takes, as long as it, and longer
        with silent_store() as (_, variables):
            env = environment(tmp_path, **variables)
            ran = run_restore(tmp_path, URL, *chosen, "--deadline", deadline, "--", "true", env=env)
        assert (ran.code, ran.line["outcome"], ran.line["folder"]) == (0, "present", first.line["folder"])
        assert "in scratch space: " in ran.line["reason"] and ran.seconds < 5


def test_a_baked_folder_that_cannot_be_used_is_named_when_the_store_does_not_answer(tmp_path: Path) -> None:
    release = publish_release(tmp_path)
    run_restore(tmp_path, *words(release, "--lock", release.lock), "--strict")
    os.rename(release.store.root, tmp_path / "away")
    (Path(release.root) / "inductor/cd/ccd0.so").write_bytes(b"changed")
    ran = run_restore(tmp_path, *words(release, "--lock", release.lock), "--", "true")
    assert (ran.code, ran.line["outcome"]) == (0, "cold")
    assert f"{release.root} was restored before and cannot be used: " in ran.line["reason"]
    assert "ccd0.so" in ran.line["reason"]


def test_a_restored_folder_that_lost_its_write_bit_is_opened_for_its_owner_again(other: Path) -> None:
    release = publish_release(other, root=str(other / "theirs/cache/demo"))
    run_as_other(other, *words(release, "--lock", release.lock))
    os.chmod(release.root, 0o555)
    writes = command(["touch", f"{release.root}/new"])
    ran = run_as_other(other, *words(release, "--lock", release.lock), *writes)
    assert (ran.code, ran.line["outcome"]) == (0, "present")
    assert stat.S_IMODE(os.stat(release.root).st_mode) == 0o700


def test_a_scratch_folder_that_someone_prepared_is_not_used(tmp_path: Path) -> None:
    release = publish_release(tmp_path, root="/proc/cachepipe/demo")
    trap = tmp_path / "tmp" / f"cachepipe-{os.geteuid()}"
    env = environment(tmp_path, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    trap.mkdir(mode=0o777)
    trap.chmod(0o777)
    (tmp_path / "xdg").mkdir()
    (tmp_path / "xdg").chmod(0o777)
    ran = run_restore(tmp_path, *words(release), *command(), env=env)
    folder = ran.line["folder"]
    assert not folder.startswith(str(tmp_path))
    shutil.rmtree(folder)


def test_case_c12_no_room_is_said_with_both_numbers_and_the_service_starts(tmp_path: Path) -> None:
    release = publish_release(tmp_path)
    code = (
        "import sys\nfrom cachepipe.adapters import cachedir\n"
        "cachedir._MARGIN_BYTES = 1 << 60\nfrom cachepipe.entrypoint import main\nsys.exit(main())"
    )

    def ran(*more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", code, "restore", *words(release, "--dest", release.root), *more]
        return subprocess.run(argv, env=environment(tmp_path), capture_output=True, text=True, check=False)

    alone, service = ran(), ran("--", "sh", "-c", "echo started; exit 7")
    assert (alone.returncode, service.returncode, service.stdout) == (20, 7, "started\n")
    for one in (alone, service):
        assert "not enough room: wanted 1152921504" in one.stderr and "missing" in one.stderr
    assert not os.path.exists(release.root)


def test_case_c1_nothing_half_is_left_beside_a_restored_folder(tmp_path: Path, demo: Published) -> None:
    run_restore(tmp_path, *words(demo))
    assert sorted(os.listdir(os.path.dirname(demo.root))) == [".demo.lock", "demo"]
    assert not [path for path in files_below(demo.root) if os.path.basename(path).startswith(".")]


def test_case_c15_a_held_lock_costs_no_more_than_the_time_limit(tmp_path: Path, demo: Published) -> None:
    from cachepipe.adapters.lease import lock_file

    os.makedirs(os.path.dirname(demo.root), mode=0o700)
    handle = lock_file(f"{os.path.dirname(demo.root)}/.demo.lock", time.monotonic() + 5)
    ran = run_restore(tmp_path, *words(demo, "--deadline", "0.5"), *command(["true"]))
    os.close(handle)
    assert (ran.code, ran.line["outcome"]) == (0, "cold")
    assert ran.seconds < 0.5 + 2


def test_case_j2_a_hostile_table_writes_nothing_and_the_service_starts(tmp_path: Path) -> None:
    from cachepipe.adapters.packs import write_blob
    from cachepipe.domain.limits import LIMITS

    honest = publish_release(tmp_path)
    text = json.dumps(
        {"files": [["../../escaped", 420, 1, "0" * 64, [[0, 0, 1]], [0], False]], "format": 1, "root": honest.root}
    ).encode()
    packs = (tmp_path / "hostile").mkdir() or tmp_path / "hostile"
    pack, table = write_blob(b"x", packs, 1), write_blob(text, packs, LIMITS.table_raw_bytes)
    hostile = publish_hostile(
        tmp_path, packs, replace(honest.statement, packs=(pack,), table=table, files=1, unpacked_bytes=1)
    )
    ran = run_restore(tmp_path, f"file://{tmp_path}/store", "--name", hostile, *command(["true"]))
    assert (ran.code, ran.line["outcome"]) == (0, "cold")
    assert "unsafe path '../../escaped'" in ran.line["reason"]
    assert not list(tmp_path.rglob("escaped"))


def publish_hostile(base: Path, packs: Path, statement) -> str:  # type: ignore[no-untyped-def]
    from cachepipe.adapters.local_store import LocalStore
    from cachepipe.adapters.packs import write_blob
    from cachepipe.domain.index import PAYLOAD_TYPE, first_index, index_bytes
    from cachepipe.domain.layout import pack_key, statement_key
    from cachepipe.domain.limits import LIMITS
    from cachepipe.domain.statement import statement_bytes
    from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE
    from cachepipe.domain.ulid import ulid
    from cachepipe.workflows.fetch import row_of

    now = datetime.now(timezone.utc)
    explain = write_blob(b"{}\n", packs, LIMITS.explain_raw_bytes)
    statement = replace(statement, artifact=ulid(now, os.urandom(10)), release="hostile", explain=explain)
    store = LocalStore(base / "store")
    for blob in (*statement.packs, statement.table, statement.explain):
        store.put_if_absent(pack_key(statement.artifact, blob.digest), (packs / blob.digest).read_bytes())
    envelope = store.trust.seal(statement_bytes(statement), STATEMENT_PAYLOAD_TYPE)
    store.put_if_absent(statement_key(statement.artifact), envelope)
    index = first_index("hostile", "stable", (row_of(statement, envelope),), now, "n")
    store.put_if_absent(index_key("hostile", "stable", 1), store.trust.seal(index_bytes(index), PAYLOAD_TYPE))
    return "hostile"


# --- becoming the service ------------------------------------------------------------------------------------------------


def test_case_l1_pid_stdin_and_exit_code_are_the_services_own(tmp_path: Path, demo: Published) -> None:
    with subprocess.Popen(
        restore_words(*words(demo), "--", "/bin/sh", "-c", "echo $$; read line; exit $line"),
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as service:
        out, _ = service.communicate("42\n", timeout=30)
    assert int(out) == service.pid
    assert service.returncode == 42


def test_case_l1_signals_are_as_if_the_service_had_been_started_alone(tmp_path: Path, demo: Published) -> None:
    show = (
        "import signal; names = 'SIGPIPE SIGXFSZ SIGTERM SIGINT SIGHUP'.split(); "
        "print(open('/proc/self/status').read())"
    )
    alone = subprocess.run(
        ["grep", "^Sig[BI]", "/proc/self/status"], capture_output=True, text=True, check=True, env=environment(tmp_path)
    )
    ran = run_restore(tmp_path, *words(demo), *command(["grep", "^Sig[BI]", "/proc/self/status"]))
    assert ran.out == alone.stdout, show


def test_case_l1_the_signal_mask_is_reset(tmp_path: Path, demo: Published) -> None:
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])

    ran = run_restore(tmp_path, *words(demo), *command(["grep", "SigBlk", "/proc/self/status"]), preexec_fn=block)
    assert int(ran.out.split()[1], 16) == 0


@pytest.mark.parametrize(
    ("what", "code"), [(["/no/such/command"], 127), (["no-such-command"], 127), (["/etc/passwd"], 126), (["/tmp"], 126)]
)
@pytest.mark.parametrize("is_disabled", [False, True])
def test_a_command_that_cannot_run_has_the_shells_exit_code(
    tmp_path: Path, demo: Published, what: list[str], code: int, is_disabled: bool
) -> None:
    env = environment(tmp_path, **({"CACHEPIPE_DISABLE": "1"} if is_disabled else {}))
    ran = run_restore(tmp_path, *words(demo), *command(what), env=env)
    assert ran.code == code
    assert f"cannot run `{what[0]}`" in ran.err


def signal_another_thread(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Has a thread take the signal that is not the one which waits: the kernel may choose any."""
    others = [int(name) for name in os.listdir(f"/proc/{process.pid}/task") if int(name) != process.pid]
    assert others and ctypes.CDLL(None).tgkill(process.pid, others[0], number) == 0


@pytest.mark.parametrize("send", [subprocess.Popen.send_signal, signal_another_thread])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_restore_ends_it_without_a_start(
    tmp_path: Path, number: signal.Signals, code: int, send: Callable[[subprocess.Popen[bytes], signal.Signals], None]
) -> None:
    with (
        silent_store() as (server, variables),
        subprocess.Popen(
            restore_words(URL, "--name", "demo", "--", "touch", str(tmp_path / "started")),
            env=environment(tmp_path, **variables),
            stderr=subprocess.PIPE,
        ) as process,
        server.accept()[0],
    ):  # it is asked for the hint
        send(process, number)
        _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert b"outcome=refused" in err
    assert not (tmp_path / "started").exists()


def test_a_store_that_hangs_holds_no_service_beyond_its_deadline(tmp_path: Path) -> None:
    with silent_store() as (_, variables):
        asked = (URL, "--name", "demo", "--deadline", "0.6", *command())
        ran = run_restore(tmp_path, *asked, env=environment(tmp_path, **variables))
    assert ran.seconds < 0.6 + 2
    assert "not restored within 0.6 seconds" in ran.line["reason"]
    folder = os.path.dirname(service_environment(ran)["TORCHINDUCTOR_CACHE_DIR"])
    assert (os.listdir(folder), stat.S_IMODE(os.stat(folder).st_mode)) == ([".lease"], 0o700)
    assert "CACHEPIPE_ROOT" not in service_environment(ran)


def test_the_kill_switch_changes_nothing_and_imports_the_standard_library_alone(tmp_path: Path) -> None:
    env = environment(tmp_path, CACHEPIPE_DISABLE="1", PYTHONPROFILEIMPORTTIME="1")
    ran = run_restore(tmp_path, "--no-such-option", *command(["/usr/bin/env"]), env=env)
    assert ran.code == 0
    assert 'outcome=disabled reason="CACHEPIPE_DISABLE is set"' in ran.err
    imported = {line.rpartition("|")[2].strip() for line in ran.err.splitlines() if line.startswith("import time:")}
    assert {name for name in imported if name.startswith("cachepipe")} == {"cachepipe", "cachepipe.entrypoint"}
    assert not imported & {*HEAVY, "json", "dataclasses", "zstandard", "threading"}
    assert "TORCHINDUCTOR_CACHE_DIR" not in ran.out


# --- whatever goes wrong, the service starts ------------------------------------------------------------------------------


def test_an_unknown_option_does_not_keep_the_service_down(tmp_path: Path, demo: Published) -> None:
    ran = run_restore(tmp_path, *words(demo, "--chanel", "x"), *command())
    assert (ran.code, ran.line["outcome"]) == (0, "cold")
    assert "did you mean `--channel`?" in ran.line["reason"]
    assert service_environment(ran)["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tmp_path}/tmp/")


FAILURES = {
    "no store": (("--name", "demo"), 2),
    "no name": (("{store}",), 2),
    "absent release": (("{store}", "--name", "absent"), 12),
    "absent store": (("file:///no/such/store", "--name", "demo"), 12),
    "foreign scheme": (("gopher://x", "--name", "demo"), 15),
    "store is a file": (("file://{base}/demo.lock", "--name", "demo"), 15),
    "bad name": (("{store}", "--name", "../x"), 2),
    "same name twice": (("{store}", "--name", "demo", "--name", "demo"), 2),
    "absent lock": (("{store}", "--lock", "/no/such/lock"), 2),
    "lock is garbage": (("{store}", "--lock", "/etc/passwd"), 13),
    "lock is a folder": (("{store}", "--lock", "/tmp"), 2),
    "lock of another": (("{store}", "--name", "other", "--lock", "{base}/demo.lock"), 2),
    "unknown option": (("{store}", "--name", "demo", "--wat"), 2),
    "bad deadline": (("{store}", "--name", "demo", "--deadline", "soon"), 2),
    "dest not private": (("{store}", "--name", "demo", "--dest", "{base}/open/demo"), 17),
}


@pytest.mark.parametrize("name", FAILURES)
def test_strict_exits_with_the_reasons_code_and_else_the_service_starts(
    tmp_path: Path, demo: Published, name: str
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    given, code = FAILURES[name]
    given = tuple(word.format(store=demo.store.url, base=tmp_path) for word in given)
    strict = run_restore(tmp_path, *given, "--strict", *command(["echo", "started"]))
    if name == "dest not private":
        assert (strict.code, strict.line["outcome"]) == (0, "restored")  # relocated: a warm start is no failure
    else:
        assert (strict.code, strict.out, strict.line["outcome"]) == (code, "", "refused")
    lenient = run_restore(tmp_path, *given, *command(["echo", "started"]))
    assert (lenient.code, lenient.out) == (0, "started\n")
    assert len([line for line in lenient.err.splitlines() if line.startswith("cachepipe restore")]) == 1
    without = run_restore(tmp_path, *given)
    assert (without.code, without.out) == (code, "")


@pytest.mark.parametrize(
    "harm", ["pack gone", "pack swapped", "table gone", "statement gone", "statement cut", "index cut"]
)
def test_a_harmed_store_gives_a_cold_start_by_name(tmp_path: Path, demo: Published, harm: str) -> None:
    artifact = tmp_path / "store/v1/artifacts" / demo.row.artifact
    pack = artifact / "packs" / demo.statement.packs[0].digest
    table = artifact / "packs" / demo.statement.table.digest
    statement, index = artifact / "statement.dsse.json", tmp_path / "store" / index_key("demo", "stable", 1)
    {
        "pack gone": pack.unlink,
        "pack swapped": lambda: pack.write_bytes(table.read_bytes()),
        "table gone": table.unlink,
        "statement gone": statement.unlink,
        "statement cut": lambda: os.truncate(statement, 100),
        "index cut": lambda: os.truncate(index, 100),
    }[harm]()
    ran = run_restore(tmp_path, *words(demo), *command(["true"]))
    assert (ran.code, ran.line["outcome"]) == (0, "cold")
    assert run_restore(tmp_path, *words(demo, "--strict"), *command(["true"])).code == 13
    assert not os.path.exists(demo.root)
    assert not list((tmp_path / "cache").glob("*.tmp.*"))


def test_another_machine_is_refused_before_any_pack_is_read(tmp_path: Path) -> None:
    honest = publish_release(tmp_path)
    parts = tuple(replace(p, value="9.9.9") if p.name == "torch" else p for p in honest.statement.fingerprint)
    other = publish_release(tmp_path, "other", fingerprint=parts)
    shutil.rmtree(tmp_path / "store/v1/artifacts" / other.row.artifact / "packs")
    ran = run_restore(tmp_path, *words(other, "--strict"), *command(["true"]))
    assert ran.code == 19
    assert "torch: wanted 9.9.9, found" in ran.line["reason"]
    assert isinstance(parts[0], Part)


def test_an_expired_channel_is_not_used(tmp_path: Path, demo: Published) -> None:
    from cachepipe.domain.index import PAYLOAD_TYPE, advance, first_index, index_bytes

    old = datetime.now(timezone.utc) - timedelta(days=30)
    index = advance(first_index("demo", "stable", (demo.row,), old, "n"), (demo.row,), old, "m")
    demo.store.put_if_absent(index_key("demo", "stable", 2), demo.store.trust.seal(index_bytes(index), PAYLOAD_TYPE))
    ran = run_restore(tmp_path, *words(demo, "--strict"), *command(["true"]))
    assert ran.code == 14
    assert "expired" in ran.line["reason"]


# --- data on stdout, env files, quarantine, several releases ---------------------------------------------------------------


def test_json_is_one_object_on_stdout(tmp_path: Path, demo: Published) -> None:
    ran = run_restore(tmp_path, *words(demo, "--json"))
    tree = json.loads(ran.out)
    assert (tree["outcome"], tree["exit_code"], tree["folder"]) == ("restored", 0, demo.root)
    assert tree["variables"]["CACHEPIPE_ROOT"] == demo.root
    failed = run_restore(tmp_path, demo.store.url, "--name", "absent", "--json")
    assert (json.loads(failed.out)["exit_code"], failed.code) == (12, 12)
    assert run_restore(tmp_path, *words(demo)).out == ""


def test_an_empty_folder_that_a_shell_reads_of_is_never_swept(tmp_path: Path) -> None:
    path = tmp_path / "env"
    ran = run_restore(tmp_path, f"file://{tmp_path}/none", "--name", "absent", "--env-file", str(path), "--", "true")
    assert ran.line["outcome"] == "cold"
    script = f". {path}; dirname $TORCHINDUCTOR_CACHE_DIR"
    folder = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert os.listdir(folder) == [], "a lease that our command held would end before the shell's own"


def test_an_env_file_starts_a_shell_with_the_same_variables(tmp_path: Path, demo: Published) -> None:
    path = tmp_path / "env"
    assert run_restore(tmp_path, *words(demo, "--env-file", str(path))).code == 0
    values = dict(line.split("=", 1) for line in path.read_text().splitlines())
    assert values["CACHEPIPE_ROOT"] == demo.root
    assert values["TORCHINDUCTOR_CACHE_DIR"] == f"{demo.root}/inductor"
    failed = run_restore(tmp_path, demo.store.url, "--name", "absent", "--env-file", str(path))
    assert (failed.code, failed.line["outcome"]) == (12, "cold")
    values = dict(line.split("=", 1) for line in path.read_text().splitlines())
    assert "CACHEPIPE_ROOT" not in values
    assert os.listdir(os.path.dirname(values["TORCHINDUCTOR_CACHE_DIR"])) == []


CRASH = (
    "import os, signal\nfrom cachepipe.runtime import attempts\ne = os.environ\n"
    "a = attempts.begin(e['CACHEPIPE_STATE_DIR'], e['CACHEPIPE_RESTORED'], e['CACHEPIPE_START_ID'])\n"
    "os.kill(os.getpid(), signal.SIGKILL)"
)


def test_two_starts_that_crash_give_one_cold_start_and_then_another_try(tmp_path: Path, demo: Published) -> None:
    crash = command([sys.executable, "-c", CRASH])
    for more in ((), ("--lock", demo.lock)):
        runs = [run_restore(tmp_path, *words(demo, *more), *crash) for _ in range(2)]
        assert [ran.code for ran in runs] == [-signal.SIGKILL] * 2
        assert {ran.line["outcome"] for ran in runs} <= {"restored", "present"}
        cold = run_restore(tmp_path, *words(demo, *more), *command())
        assert cold.line["outcome"] == "cold"
        assert "quarantined for this start" in cold.line["reason"]
        assert "the next start tries it again" in cold.line["hint"]
        assert "CACHEPIPE_RESTORED" not in service_environment(cold)
        assert run_restore(tmp_path, *words(demo, *more), *command(["true"])).line["outcome"] == "present"


KERNELS = Path(__file__).parents[1] / "fixtures" / "gpu" / "one-kernel-from-two-files.tar.gz"


def test_releases_that_share_a_kernel_become_one_folder(tmp_path: Path) -> None:
    with tarfile.open(KERNELS) as archive:
        archive.extractall(tmp_path, filter="data")
    published = []
    for number, name in enumerate(("one", "two")):
        found = files_below(str(tmp_path / name))
        record = b'{"XBLOCK": 64, "configs_hash": "h", "time_taken_ms": %d}' % number
        files = {**found, "inductor/ab/shared.best_config": record, f"inductor/cd/{name}.py": b"# own"}
        published.append(publish_release(tmp_path, name, files=files))
    one, two = published
    ran = run_restore(tmp_path, one.store.url, "--name", "one", "--name", "two", "--strict", *command())
    assert ran.line["outcome"] == "restored", ran.line
    found = files_below(service_environment(ran)["CACHEPIPE_ROOT"])
    assert {path: found[path] for path in one.files} == one.files
    assert found.keys() == one.files.keys() | two.files.keys()


def test_releases_that_chose_otherwise_for_one_kernel_are_refused_by_name(tmp_path: Path) -> None:
    path = "inductor/ab/shared.best_config"
    for number, name in enumerate(("one", "two")):
        record = b'{"XBLOCK": %d, "configs_hash": "h", "time_taken_ms": 1}' % (64 << number)
        published = publish_release(tmp_path, name, files={path: record, f"inductor/cd/{name}.py": b"# own"})
    ran = run_restore(tmp_path, published.store.url, "--name", "one", "--name", "two", *command())
    assert (ran.code, ran.line["outcome"]) == (0, "cold")
    assert path in ran.line["reason"] and "build them in one manifest" in ran.line["hint"]


def test_several_releases_become_one_folder(tmp_path: Path, demo: Published) -> None:
    second = publish_release(tmp_path, "second", number=1)
    ran = run_restore(tmp_path, *words(demo, "--name", "second"), *command())
    folder = service_environment(ran)["CACHEPIPE_ROOT"]
    assert os.path.dirname(folder) == os.path.dirname(demo.root)
    assert len(os.path.basename(folder)) == 12
    found, path = files_below(folder), "inductor/cache/system"
    merged = {**demo.restored_bytes(folder), **second.files}
    merged = {p: d.replace(second.root.encode(), folder.encode()) for p, d in merged.items()}
    assert {p: d for p, d in found.items() if p != path} == {p: d for p, d in merged.items() if p != path}
    assert set(json.loads(found[path])["cache"]) == {"op0", "op1"}
    assert service_environment(ran)["CACHEPIPE_RESTORED"] == f"{demo.row.statement},{second.row.statement}"
    assert len(os.listdir(f"{folder}/.cachepipe/statements")) == 2
    locks = ("--lock", demo.lock, "--lock", second.lock)
    shutil.rmtree(tmp_path / "store")
    again = run_restore(tmp_path, *locks, *command())
    assert (again.line["outcome"], again.line["folder"]) == ("present", folder)


def test_releases_with_different_bytes_at_one_path_are_refused_by_name(tmp_path: Path, demo: Published) -> None:
    files = {**tree_files(demo.root, 1), "inductor/cd/ccd0.py": b"print('other')\n"}
    publish_release(tmp_path, "second", number=1, files=files)
    ran = run_restore(tmp_path, *words(demo, "--name", "second", "--strict"))
    assert ran.code == 13
    assert "inductor/cd/ccd0.py" in ran.line["reason"]


def test_releases_that_want_different_variables_are_refused_by_name(tmp_path: Path, demo: Published) -> None:
    publish_release(tmp_path, "second", number=1, variables={"TORCHINDUCTOR_VEC_ISA_OK": "0"})
    ran = run_restore(tmp_path, *words(demo, "--name", "second"), *command(["true"]))
    assert ran.line["outcome"] == "cold"
    assert "variable TORCHINDUCTOR_VEC_ISA_OK of `second`" in ran.line["reason"]


# --- compiler and ISA ------------------------------------------------------------------------------------------------------


def test_without_a_compiler_a_stub_answers_for_it(tmp_path: Path) -> None:
    texts = {"--version": "g++ (Test) 1.2.3\n", "-v": "gcc version 1.2.3\n"}
    release = publish_release(tmp_path, compiler=texts)
    (tmp_path / "bin").mkdir()
    env = environment(tmp_path, PATH=str(tmp_path / "bin"))
    ran = run_restore(tmp_path, *words(release), *command(["g++", "--version"]), env=env)
    assert ran.out == texts["--version"]
    with_one = run_restore(tmp_path, *words(release), *command())
    if shutil.which("g++"):
        assert service_environment(with_one)["PATH"] == os.environ["PATH"]


def test_a_lowered_isa_is_pinned_in_the_service(tmp_path: Path) -> None:
    from cachepipe.adapters.machine import Host, cpu_flags, vector_isa

    honest = publish_release(tmp_path)
    parts = (*honest.statement.fingerprint, Part("cpu_isa", "avx2"))
    release = publish_release(tmp_path, "lowered", fingerprint=parts)
    ran = run_restore(tmp_path, *words(release), *command())
    here = vector_isa(cpu_flags(Host()))
    if here.startswith(("avx512", "amx")):
        assert service_environment(ran)["ATEN_CPU_CAPABILITY"] == "avx2"
    else:
        assert "ATEN_CPU_CAPABILITY" not in service_environment(ran)


def test_a_foreign_folder_at_the_final_path_is_left_alone(tmp_path: Path, demo: Published) -> None:
    os.makedirs(demo.root, mode=0o700)
    Path(demo.root, "id_rsa").write_text("secret")
    ran = run_restore(tmp_path, *words(demo), *command())
    assert os.listdir(demo.root) == ["id_rsa"]
    assert service_environment(ran)["CACHEPIPE_ROOT"] == f"{demo.root}.{demo.row.statement[:12]}"
    assert "holds what cachepipe did not make" in ran.line["reason"]


def test_the_lease_is_held_while_the_service_lives(tmp_path: Path, demo: Published) -> None:
    with subprocess.Popen(
        restore_words(*words(demo), "--", *PRINT_ENVIRONMENT[:2], "print(flush=True); input()"),
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as service:
        assert service.stdout is not None
        service.stdout.readline()
        assert not Lease.is_free(demo.root)
        service.communicate(b"\n")
    assert Lease.is_free(demo.root)
