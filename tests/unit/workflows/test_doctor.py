"""The doctor: every finding that costs a warm start is a verdict with an advice, and nothing that is found ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachepipe.adapters import gpu_watch
from cachepipe.adapters.local_store import LocalStore
from cachepipe.adapters.machine import machine_fingerprint
from cachepipe.adapters.mounts import mount_of
from cachepipe.adapters.store import TrustChoice
from cachepipe.cli.main import main
from cachepipe.domain.checkup import FAIL, NOTE, OK, WARN, Check, Checkup
from cachepipe.domain.defects import DEFECTS, defects_of
from cachepipe.domain.fingerprint import SEVERAL, UNKNOWN, Fingerprint, Part
from cachepipe.domain.index import parse_timestamp
from cachepipe.domain.layout import index_key, statement_key
from cachepipe.domain.policy import Key
from cachepipe.errors import UnsafePathError
from cachepipe.runtime import attempts, backports
from cachepipe.workflows import doctor as module
from cachepipe.workflows import doctor_ask
from cachepipe.workflows.doctor import DoctorRequest, doctor
from cachepipe.workflows.doctor_ask import Question, answers
from cachepipe.workflows.doctor_store import store_checks
from cachepipe.workflows.fetch import newest
from tests.support import authority, hanging
from tests.support.nvml import Binding
from tests.support.release import clean_environment
from tests.support.restoring import publish_release

NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


def found(checks: Any, name: str, verdict: str | None = None) -> list[Check]:
    return [check for check in checks if check.name == name and verdict in (None, check.verdict)]


def examine(tmp_path: Path, environment: dict[str, str] | None = None, **changes: Any) -> Checkup:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700, exist_ok=True)
    words = {"PATH": os.environ["PATH"], **(environment or {})}
    return doctor(DoctorRequest(cache_root=str(root), environment=words, **changes), NOW)


def test_a_usable_machine_passes_and_torch_is_never_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from datetime import datetime, timezone\n"
        "from cachepipe.workflows.doctor import DoctorRequest, doctor\n"
        f"checkup = doctor(DoctorRequest(cache_root={str(tmp_path / 'absent')!r}), datetime.now(timezone.utc))\n"
        "assert checkup.is_healthy, checkup.failures\n"
        "assert 'torch' not in sys.modules\n"
    )
    steering = ("TORCH", "TRITON", "CACHEPIPE", "CXX", "LOG_TLPARSE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_look_changes_no_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o755)
    assert found(examine(tmp_path).checks, "restores go to")[0].value == str(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("TORCH_COMPILE_DEBUG", FAIL),
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", FAIL),
        ("TORCHDYNAMO_DISABLE", FAIL),
        ("LOG_TLPARSE", FAIL),
        ("CXX", WARN),
        ("CACHEPIPE_DISABLE", FAIL),
    ],
)
def test_a_variable_that_loses_every_entry_is_named_with_what_to_do(tmp_path: Path, name: str, verdict: str) -> None:
    (check,) = found(examine(tmp_path, {name: "1"}).checks, name)
    assert check.verdict == verdict and check.advice
    assert found(examine(tmp_path, {name: ""}).checks, name) == []


def test_a_folder_that_others_can_write_is_not_used_and_the_install_line_is_given(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache").chmod(0o777)
    (check,) = found(examine(tmp_path).checks, "restores go to")
    assert check.verdict in (WARN, FAIL) and "writable by others" in check.value
    assert "install -d -m 0700" in check.advice or "--dest" in check.advice


def test_the_mount_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    mount = mount_of(str(tmp_path / "not" / "there"))
    assert mount.path == str(tmp_path) and mount.size_bytes > 0 and not mount.is_read_only


def test_the_longest_mount_point_wins_and_blanks_in_it_are_read(tmp_path: Path) -> None:
    info = tmp_path / "mountinfo"
    (tmp_path / "a b").mkdir()
    rows = ["1 0 8:1 / / rw - ext4 /dev/x rw", f"2 1 0:5 / {tmp_path}/a\\040b rw - nfs4 host:/x rw"]
    info.write_text("\n".join(rows) + "\n")
    assert mount_of(str(tmp_path / "a b" / "c"), str(info)).kind == "nfs4"
    assert mount_of(str(tmp_path), str(info)).kind == "ext4"
    assert mount_of(str(tmp_path), str(tmp_path / "absent")).kind == "unknown"


def test_a_tmpfs_and_a_read_only_noexec_network_mount_are_findings() -> None:
    mount = module.Mount("/x", "/x", "tmpfs", True, True, True, 1 << 30, 1 << 20, 5)
    verdicts = {check.value: check.verdict for check in module._mount("cache root", mount)}
    assert verdicts["read-only"] == verdicts["noexec"] == verdicts["network file system"] == WARN
    assert verdicts["little room"] == WARN and verdicts["tmpfs of 1.0 GiB"] == NOTE


def test_the_defects_of_a_version_name_their_back_port_and_every_back_port_has_a_defect() -> None:
    assert {defect.backport for defect in defects_of((2, 11))} >= {"tuning-record"}
    assert {defect.backport for defect in defects_of((2, 13))} >= {"isa-probe"}
    assert defects_of((2, 99)) == ()
    known = {backport.name for backport in backports.TABLE}
    assert {defect.backport for defect in DEFECTS} - {""} <= known


def test_an_absent_store_an_empty_one_and_a_foreign_scheme_are_told_apart(tmp_path: Path) -> None:
    none, policy = store_checks(None, (), "stable", NOW, False)
    assert none.verdict == NOTE and (policy.section, policy.name) == ("trust", "policy")
    foreign, _ = store_checks("gs://bucket", (), "stable", NOW, False)
    assert foreign.verdict == FAIL and "gs://" in foreign.value
    empty = store_checks(f"file://{tmp_path}", ("encoder",), "stable", NOW, True)
    assert [check.verdict for check in found(empty, f"file://{tmp_path}")] == [FAIL]
    assert found(empty, "encoder@stable", FAIL)
    assert "a second creation is refused" in found(empty, "conditions")[0].value
    assert list(LocalStore(str(tmp_path)).list("v1/probes")) == []


def test_a_store_that_ignores_conditions_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(LocalStore, "put_if_absent", lambda self, key, data: True)
    (check,) = found(store_checks(f"file://{tmp_path}", (), "stable", NOW, True), "conditions")
    assert check.verdict == FAIL and "conditional writes" in check.advice


NAMED_BUT_UNUSABLE: dict[str, tuple[str, str, str]] = {
    "a name that is not there": ("encodr", "stable", "nothing is published"),
    "a channel that is not there": ("encoder", "canary", "nothing is published"),
    "no name at all": ("no such name", "stable", "is not 1-64 characters"),
    "a release for another machine": ("foreign", "stable", "torch: wanted 1.0.0, found"),
    "an index that is none": ("broken", "stable", "index broken@stable"),
    "a statement that is gone": ("gone", "stable", "missing in the store"),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a release that can be used here and others that cannot, each in its own way."""
    base = tmp_path_factory.mktemp("mixed")
    good = publish_release(base, "encoder")
    parts = tuple(Part(part.name, "1.0.0") if part.name == "torch" else part for part in good.statement.fingerprint)
    publish_release(base, "foreign", fingerprint=parts)
    broken = publish_release(base, "broken", number=1)
    gone = publish_release(base, "gone", number=2)
    Path(broken.store.root, index_key("broken", "stable", 1)).write_bytes(b"{}")
    Path(gone.store.root, statement_key(gone.row.artifact)).unlink()
    return good.store.url


@pytest.mark.parametrize("case", NAMED_BUT_UNUSABLE)
def test_a_named_release_that_cannot_be_used_here_fails_with_the_reason(mixed: str, case: str, tmp_path: Path) -> None:
    name, channel, reason = NAMED_BUT_UNUSABLE[case]
    checks = store_checks(mixed, ("encoder", name), channel, NOW, False)
    failed = [check for check in checks if check.verdict == FAIL and check.name.startswith(f"{name}@{channel}")]
    assert any(reason in check.value for check in failed) and all(check.advice for check in failed)
    if channel == "stable":
        assert any("fits this machine" in check.value for check in checks), "the other release is still looked at"


def test_a_mistyped_name_is_answered_with_the_nearest_and_a_channel_with_the_others(mixed: str) -> None:
    (typo,) = found(store_checks(mixed, ("encodr",), "stable", NOW, False), "encodr@stable")
    assert "`encoder`" in typo.advice
    (elsewhere,) = found(store_checks(mixed, ("encoder",), "canary", NOW, False), "encoder@canary")
    assert "it is in stable" in elsewhere.advice


def test_a_store_where_nothing_fits_or_that_is_not_there_fails(tmp_path: Path) -> None:
    published = publish_release(tmp_path, fingerprint=(Part("device", "cpu"), Part("torch", "1.0.0")))
    (none_fits,) = found(store_checks(published.store.url, (), "stable", NOW, False), "channels")
    assert none_fits.verdict == FAIL
    typo = f"file://{tmp_path}/stroe"
    assert [check.verdict for check in found(store_checks(typo, (), "stable", NOW, False), typo)] == [FAIL]
    no_store, _ = store_checks(None, ("demo",), "stable", NOW, False)
    assert no_store.verdict == FAIL, "releases are named, and there is no store to have them"


class Quiet(Binding):
    """A GPU on which `pids` run, with these throttle reasons."""

    def __init__(self, throttle: int, *pids: int) -> None:
        self.throttle, self.pids = throttle, pids

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: int) -> int:  # noqa: N802
        return self.throttle


@pytest.mark.parametrize(
    ("nvml", "verdict", "words"),
    [(Quiet(1), OK, "52 °C"), (Quiet(0x40), WARN, "too hot"), (Quiet(1, 1, 2), WARN, "2 other processes use it")],
    ids=["quiet", "hot", "shared"],
)
def test_the_state_of_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch, nvml: Quiet, verdict: str, words: str) -> None:
    monkeypatch.setattr(gpu_watch, "binding", lambda: nvml)
    (check,) = module._gpu_state({})
    assert check.verdict == verdict and words in check.value and "1980 MHz" in check.value


def test_the_folder_that_torch_takes_by_itself_is_named_with_its_mount() -> None:
    environment = {"PATH": os.environ["PATH"], "USER": "a:b"}
    rows = found(doctor(DoctorRequest(environment=environment), NOW).checks, "TORCHINDUCTOR_CACHE_DIR")
    assert rows[0].value.endswith("/torchinductor_a_b") and " on " in rows[1].value


def test_a_user_without_a_name_is_told_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    (row,) = found(doctor(DoctorRequest(environment={}), NOW).checks, "TORCHINDUCTOR_CACHE_DIR")
    assert row.verdict == WARN and "has no name" in row.value


class Panic(BaseException):
    """As a native library's: no Exception."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error", "/mnt/x"),
        ValueError("embedded null byte"),
        KeyError("x"),
        RecursionError("deep"),
        MemoryError(),
        SystemExit(3),
        KeyboardInterrupt(),
        Panic("p"),
        UnsafePathError("/mnt/x", "odd"),
        StopIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_breaks_in_one_question_is_its_verdict_and_the_others_go_on(error: BaseException) -> None:
    def broken() -> list[Check]:
        raise error

    rows = answers([Question("a", "one", broken), Question("a", "two", lambda: [Check("a", "two", "fine")])])
    assert [(row.name, row.verdict) for row in rows] == [("one", FAIL), ("two", OK)]
    assert rows[0].value and rows[0].advice


def test_what_hangs_costs_its_limit_once_however_many_questions_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_ask, "LIMIT_S", 0.3)
    ends = threading.Event()

    def hangs() -> list[Check]:
        ends.wait()
        return []

    began = time.monotonic()
    rows = answers([Question("a", str(number), hangs) for number in range(20)])
    ends.set()
    assert [row.verdict for row in rows] == [FAIL] * 20 and time.monotonic() - began < 3


def test_every_check_of_the_page_is_asked_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question broken in turn: the page still comes, with that one failed."""
    asked: list[str] = []
    real = doctor_ask._started

    def breaks(number: int) -> Any:
        def started(question: Question) -> Any:
            asked.append(question.name)
            return real(question._replace(ask=lambda: 1 / 0) if len(asked) == number else question)

        return started

    for number in range(1, 100):
        asked.clear()
        monkeypatch.setattr(doctor_ask, "_started", breaks(number))
        checks = examine(tmp_path, store=f"file://{tmp_path}/absent").checks
        if number > len(asked):
            break
        assert [check.name for check in checks if "ZeroDivisionError" in check.value] == [asked[number - 1]]
    assert number > 10


@pytest.mark.parametrize("call", ["statvfs", "nvml", "getaddrinfo"])
def test_a_dead_mount_driver_or_name_server_is_a_finding_and_the_process_ends(tmp_path: Path, call: str) -> None:
    code = (
        "import sys\nfrom cachepipe.workflows import doctor_ask\ndoctor_ask.LIMIT_S = 2.0\n"
        "from cachepipe.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    store = "s3://bucket/x" if call == "getaddrinfo" else f"file://{tmp_path}"
    env = clean_environment(**hanging.variables(), HANG=call, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
    env |= {"AWS_ENDPOINT_URL": "http://store.invalid:1", "AWS_REGION": "eu-west-1"}
    words = [sys.executable, "-c", code, "doctor", store, "--json", "--cache-root", str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == 18, done.stderr
    assert [check for check in document["checks"] if check["value"].startswith("no answer")], document


def test_starts_that_died_with_what_is_restored_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cachepipe.domain.marker import FORMAT, Marker, marker_bytes

    digest = "d" * 64
    folder = tmp_path / "cache" / "encoder"
    (folder / ".cachepipe").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    marker = Marker(
        FORMAT, ("encoder",), (digest,), str(folder), "h", "stable", 1, "", "signed", "none", 0, {}, "", False, ()
    )
    (folder / ".cachepipe" / "marker.json").write_bytes(marker_bytes(marker))
    state = str(tmp_path / "cache" / ".state")
    assert found(examine(tmp_path).checks, "starts", OK)
    for number in range(2):
        attempt = attempts.begin(state, digest, f"start{number}")
        assert attempt._handle is not None
        os.close(attempt._handle)  # as the kernel does for a process that dies
    (check,) = found(examine(tmp_path).checks, "encoder", FAIL)
    assert check.section == "quarantine" and "2 starts" in check.value
    restored = found(examine(tmp_path).checks, "restored encoder")
    assert any("dddddddddddd" in one.value for one in restored)


def test_an_expired_channel_fails_and_one_that_expires_soon_warns(tmp_path: Path) -> None:
    published = publish_release(tmp_path)
    url = published.store.url
    index = newest(published.store, "demo", "stable")
    assert index is not None
    expires = parse_timestamp(index.index.expires_at, "expires_at")
    for now, verdict in ((expires - timedelta(days=9), OK), (expires - timedelta(days=1), WARN), (expires, FAIL)):
        checks = store_checks(url, ("demo",), "stable", now, False)
        assert [
            check.verdict for check in checks if check.name.startswith("demo@stable") and "expire" in check.value
        ] == [verdict]


KEYS_NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


def trusted(tmp_path: Path, *keys: Key, **fields: object) -> list[Check]:
    """Returns the trust's checks of an empty store under a policy file."""
    path = authority.write_policy(tmp_path / "policy.json", authority.policy(*keys, **fields))
    checks = store_checks(f"file://{tmp_path}/store", (), "stable", KEYS_NOW, False, TrustChoice(policy_file=path))
    return [check for check in checks if check.section == "trust"]


def test_a_policy_is_told_with_its_keys_roles_and_ends(tmp_path: Path) -> None:
    key = authority.key
    checks = trusted(
        tmp_path,
        key("s", "statement", not_after="2030-06-01T00:00:00Z"),
        key("i", "index", not_after="2030-01-10T00:00:00Z"),
        key("old", "index", not_after="2029-12-31T00:00:00Z"),
        revoked=("a" * 64,),
    )
    told = {(check.name.split()[0], check.verdict, check.value) for check in checks}
    assert ("policy", OK, f"{tmp_path}/policy.json: 3 keys, 1 revoked statements") in told
    assert {("role", OK, "1 live keys, 1 wanted")} <= told
    assert ("key", OK, "ends 2030-06-01T00:00:00Z") in told
    assert ("key", WARN, "ends 2030-01-10T00:00:00Z") in told
    assert ("key", NOTE, "ended 2029-12-31T00:00:00Z") in told


def test_a_role_with_too_few_live_keys_fails(tmp_path: Path) -> None:
    key = authority.key
    ended = key("i", "index", not_after="2029-12-31T00:00:00Z")
    checks = trusted(tmp_path, key("s", "statement"), ended, key("s2", "statement"), thresholds={"statement": 2})
    assert {check.name: check.verdict for check in checks if check.name.startswith("role")} == {
        "role statement": OK,
        "role index": FAIL,
    }


def test_a_policy_that_cannot_be_used_fails_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text("{}")
    (tmp_path / "policy.json").chmod(0o600)
    choice = TrustChoice(policy_file=str(tmp_path / "policy.json"))
    checks = store_checks(f"file://{tmp_path}/store", (), "stable", KEYS_NOW, False, choice)
    assert [check for check in checks if check.verdict == FAIL and "policy" in check.value]


def test_development_keys_and_unsigned_channels_warn(tmp_path: Path) -> None:
    published = publish_release(tmp_path)
    index = newest(published.store, "demo", "stable")
    assert index is not None
    now = parse_timestamp(index.index.created_at, "created_at")
    checks = store_checks(published.store.url, ("demo",), "stable", now, False)
    (signatures,) = [check for check in checks if check.name == "signatures"]
    assert (signatures.value, signatures.verdict) == ("development key", WARN)
    (policy,) = [check for check in checks if check.name == "policy"]
    assert "development keys" in policy.value


def test_the_command_exits_with_18_and_prints_one_document(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "cachepipe", "doctor", "--json", "--cache-root", str(tmp_path / "cache")]
    env = {**os.environ, "TORCH_COMPILE_DEBUG": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    document = json.loads(done.stdout)
    assert done.returncode == 18 and document["healthy"] is False
    assert any(check["name"] == "TORCH_COMPILE_DEBUG" and check["verdict"] == FAIL for check in document["checks"])


def test_a_healthy_machine_is_exit_0_with_the_same_facts_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    (tmp_path / "cache").mkdir(mode=0o700)
    words = ["doctor", "--cache-root", str(tmp_path / "cache")]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "verdict: ok" in page
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["healthy"] is True
    missing = [check["name"] for check in document["checks"] if check["name"].split()[0] not in page]
    assert missing == [] and {check["verdict"] for check in document["checks"]} <= {OK, NOTE, WARN}


def test_the_fingerprint_is_told_part_by_part_as_a_builder_here_would_sign_it(tmp_path: Path) -> None:
    checks = [check for check in examine(tmp_path).checks if check.section == "machine"]
    machine = machine_fingerprint(["cpu", "cuda"])
    (whole,) = found(checks, "fingerprint")
    assert (whole.value, whole.verdict) == (machine.digest[:16], OK)
    told = {check.name: check.value for check in checks}
    shown = [part for part in machine.parts if part.name not in ("cpu_flags", "compiler")]
    assert {part.name: told.get(part.name) for part in shown} == {part.name: part.value for part in shown}
    assert {"torch", "python", "platform", "machine", "libc", "venv", "threads"} <= set(told)
    flags = machine.get("cpu_flags") or ""
    assert told["cpu_flags"] == f"{len(flags.split())} flags that native code may use" and len(flags.split()) > 10


@pytest.mark.parametrize(
    ("value", "verdict", "advice"),
    [
        (f"NVIDIA A100, NVIDIA H200{SEVERAL}", FAIL, "CUDA_VISIBLE_DEVICES"),
        (UNKNOWN, WARN, "NVML"),
        ("NVIDIA H200", OK, ""),
    ],
)
def test_a_part_that_no_artifact_can_match_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, value: str, verdict: str, advice: str
) -> None:
    known = Fingerprint((Part("torch", "2.13.0"), Part("gpu", value)))
    monkeypatch.setattr(module, "machine_fingerprint", lambda devices: known)
    rows = module._fingerprint()
    assert [(row.name, row.verdict) for row in rows] == [("fingerprint", OK), ("torch", OK), ("gpu", verdict)]
    assert advice in rows[-1].advice and rows[0].value == known.digest[:16]


def compiler(folder: Path, name: str, words: str, status: int = 0) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{words}'\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_the_compiler_that_torch_would_run_is_told_by_its_version(tmp_path: Path) -> None:
    compiler(tmp_path, "g++", "g++ (test) 99.1\nmore")
    other = compiler(tmp_path, "clang++-9", "clang version 9")
    for environment in ({}, {"CXX": str(other)}):  # CXX decides nothing, in builders and services alike
        (row,) = module._compiler({"PATH": f"{tmp_path}:/bin", **environment})
        assert (row.value, row.verdict, row.advice) == ("g++ (test) 99.1", OK, "")


@pytest.mark.parametrize("case", ["absent", "broken", "another that CXX names"])
def test_without_a_compiler_the_page_says_what_still_works(tmp_path: Path, case: str) -> None:
    environment = {"PATH": str(tmp_path)}
    if case == "broken":
        compiler(tmp_path, "g++", "cannot run", status=1)
    elif case == "another that CXX names":
        environment["CXX"] = str(compiler(tmp_path, "clang++-9", "clang version 9"))
    (row,) = found(examine(tmp_path, environment).checks, "compiler")
    assert (row.value, row.verdict) == ("none on PATH", NOTE)
    assert "only hits needs none" in row.advice and "runs eager" in row.advice


FACTS = {
    "fingerprint": ("machine", "fingerprint"),
    "compiler present or not": ("machine", "compiler"),
    "GPU state, or that no GPU is visible": ("machine", "NVML"),
    "cache directories really used": ("folders", "TORCHINDUCTOR_CACHE_DIR"),
    "mounts": ("folders", "cache root"),
    "where restores go": ("folders", "restores go to"),
    "store reachable": ("store", "{store}"),
    "with which rights": ("store", "rights"),
    "conditions honoured": ("store", "conditions"),
    "expiry": ("store", "demo@stable:1"),
    "trust policy": ("trust", "policy"),
    "quarantines": ("quarantine", "starts"),
    "which back-ports apply": ("torch", "back-ports"),
    "attach": ("torch", "attach"),
}


def test_one_page_has_every_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda environment: None)
    published = publish_release(tmp_path)
    checks = examine(tmp_path, store=published.store.url, probes_store=True).checks
    told = {(check.section, check.name) for check in checks}
    wanted = {(section, name.format(store=published.store.url)) for section, name in FACTS.values()}
    assert wanted <= told, wanted - told
    assert {("torch", defect.reference) for defect in DEFECTS} & told, "known defects of this torch"
    (conditions,) = found(checks, "conditions")
    assert (conditions.value, conditions.verdict) == ("write, and a second creation is refused", OK)
