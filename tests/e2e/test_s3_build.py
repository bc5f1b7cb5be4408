"""From a manifest that names an S3 store and keys in KMS to a service that reads it: keygen, build, promote, renew, audit, lock, restore, verify."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachepipe.workflows.prove import store_variables
from tests.support import s3, seaweed
from tests.support.kms import kms_server
from tests.support.release import clean_environment, run_cachepipe

MODEL = """
import os

import torch


def net():
    found = [name for name in os.environ if "AWS" in name or "SECRET" in name]
    assert not found, f"the store's keys in a worker: {found}"
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
"""
MANIFEST = """
version: 1
name: tiny
cache_root: {root}/cache
store: {url}
targets: [{{device: cpu}}]
models:
  - name: net
    factory: tiny_model:net
    dtypes: [float32]
    modes: [default]
    call: args
    inputs: {{input: {{shape: [batch, 8], dtype: float32}}}}
    shape_buckets: [{{batch: 4}}]
gates: {{min_speedup: 0.0}}
trust: {{statement_key: kms:alias/cachepipe-build, index_key: kms:alias/cachepipe-index}}
"""


@pytest.mark.slow
def test_a_manifest_with_an_s3_store_and_keys_in_kms_from_keygen_to_service(
    tmp_path: Path, s3_server: seaweed.Seaweed
) -> None:
    url = s3.address(s3_server.endpoint)
    (tmp_path / "tiny_model.py").write_text(MODEL)
    (tmp_path / "cache").mkdir(mode=0o700)
    manifest = tmp_path / "tiny.yaml"
    manifest.write_text(MANIFEST.format(root=tmp_path, url=url))
    policy = str(tmp_path / "trust.json")
    env = clean_environment(**{**s3.environment(), "CACHEPIPE_TRUST": policy})
    del env["CACHEPIPE_STATEMENT_KEY"], env["CACHEPIPE_INDEX_KEY"]

    def cachepipe(*words: str, **more: str) -> str:
        done = run_cachepipe(*words, env={**env, **more}, timeout_s=300)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    work = ("--work", str(tmp_path / "work"))
    with kms_server(tmp_path / "trail") as variables:
        kms = {"AWS_ENDPOINT_URL_KMS": variables["AWS_ENDPOINT_URL_KMS"]}
        for role, alias in (("statement", "build"), ("index", "index")):
            cachepipe("keygen", "--role", role, "--key", f"kms:alias/cachepipe-{alias}", "--policy", policy, **kms)
        cachepipe("build", str(manifest), *work, **kms)
        for verb in ("promote", "renew"):
            cachepipe(verb, url, "--name", "tiny", CACHEPIPE_INDEX_KEY="kms:alias/cachepipe-index", **kms)
        keys = [word for alias in ("build", "index") for word in ("--kms-key", f"kms:alias/cachepipe-{alias}")]
        window = ("--since", "1h", "--until", "2099-01-01T00:00:00Z")
        log = ("--kms-log", str(tmp_path / "trail"))
        audited = json.loads(cachepipe("fsck", url, *log, *keys, *window, "--json", **kms))
    assert [(key["logged"], key["stored"]) for key in audited["keys"]] == [(1, 1), (3, 3)]
    assert audited["findings"] == []
    # from here on KMS is gone: whoever reads needs public keys alone
    cachepipe("lock", url, "--name", "tiny", "--output", str(tmp_path / "tiny.lock"))
    (channel,) = [row for row in json.loads(cachepipe("ls", url, "--json"))["channels"] if row["channel"] == "stable"]
    assert channel["name"] == "tiny"
    cachepipe("verify", str(manifest), *work, "--lock", str(tmp_path / "tiny.lock"))
    words = ("restore", url, "--name", "tiny", "--lock", str(tmp_path / "tiny.lock"), "--strict", "--json")
    found = json.loads(cachepipe(*words))
    assert (found["outcome"] in ("restored", "present"), found["trust"]) == (True, "signed")
    assert found["folder"] == f"{tmp_path}/cache/tiny"
    assert list(Path(found["folder"], "inductor").rglob("*.so"))


def test_a_worker_gets_none_of_the_stores_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**s3.environment(), "HTTPS_PROXY": "http://p", "OTHER_SECRET": "x"}.items():
        monkeypatch.setenv(name, value)
    assert store_variables("file:///srv") == {}
    given = store_variables("s3://ml-cache")
    assert {"AWS_SECRET_ACCESS_KEY", "AWS_REGION", "HTTPS_PROXY", "HOME"} <= set(given)
    assert "OTHER_SECRET" not in given
    removed = [f"--unset={name}" for name in given if name != "HOME"]
    done = subprocess.run(["env", *removed, "HOME=/w", sys.executable, "-c", "import os; print(list(os.environ))"],
        env=given, capture_output=True, text=True, check=True)  # fmt: skip
    assert not [name for name in given if name != "HOME" and name in done.stdout]
    assert os.environ["AWS_SECRET_ACCESS_KEY"]
