"""The key drills of the README pass from beginning to end, and a drill whose step does not hold fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import boto3

from tests.support.kms import REGION, kms_server
from tests.support.release import REPOSITORY, clean_environment


def drill(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = clean_environment(PYTHONPATH=str(REPOSITORY), **{"PYTHON": sys.executable, **env})
    return subprocess.run(
        ["bash", str(REPOSITORY / "ci/drill-keys"), *words], env=given, capture_output=True, text=True, check=False
    )


def passed(done: subprocess.CompletedProcess[str], steps: int) -> None:
    assert done.returncode == 0, done.stderr
    titles = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert len(titles) == steps + 1
    assert titles[-1] == "== all drills passed"
    refused = [line for line in done.stderr.splitlines() if "outcome=refused" in line]
    assert len(refused) == 7
    assert all("reason=" in line and "hint=" in line for line in refused)


def test_rotation_and_revocation_do_what_the_readme_says() -> None:
    passed(drill(), steps=9)


def test_rotation_and_revocation_with_keys_in_kms_do_what_the_readme_says() -> None:
    with kms_server() as variables:
        passed(drill(**variables, DRILL_KEYS="kms"), steps=10)
        kms = boto3.client(
            "kms", endpoint_url=variables["AWS_ENDPOINT_URL_KMS"], region_name=REGION,
            aws_access_key_id="x", aws_secret_access_key="x",
        )  # fmt: skip
        assert not [row for row in kms.list_aliases()["Aliases"] if "drill" in row["AliasName"]]
        keys = [kms.describe_key(KeyId=row["KeyId"])["KeyMetadata"] for row in kms.list_keys()["Keys"]]
    made = [key for key in keys if key["Description"] == "cachepipe"]
    assert len(made) == 8, "two roles of old, new, main and fresh keys"
    assert {(key["KeySpec"], key["KeyState"]) for key in made} == {("ECC_NIST_P256", "PendingDeletion")}


def test_a_drill_whose_step_does_not_hold_fails(tmp_path: Path) -> None:
    lax = tmp_path / "lax"
    lax.write_text(f'#!/bin/sh\n[ "$1" = restore ] && exit 0\nexec {sys.executable} -m cachepipe "$@"\n')
    lax.chmod(0o755)
    done = drill("rotation", CACHEPIPE=str(lax))
    assert done.returncode == 1
    assert "drill failed: restore under 1.json: wanted exit code 14, found 0" in done.stderr
