"""Field cases of GPU services, with a double of the driver's library: refused before anything is downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cachepipe.adapters.machine import Host, builder_fingerprint
from cachepipe.domain.variables import pinned_variables
from tests.support.nvml import Binding
from tests.support.restoring import (
    REPOSITORY,
    Published,
    Ran,
    command,
    environment,
    files_below,
    publish_release,
    run_restore,
    service_environment,
)

MISMATCH = 19
BINDING = """
import os
from tests.support.nvml import Binding, FakeError as NVMLError

class Here(Binding):
    def nvmlSystemGetDriverVersion(self):
        return os.environ.get("FAKE_DRIVER", "580.65.06")

    def nvmlDeviceGetName(self, handle):
        return os.environ.get("FAKE_GPU") or Binding.__getattr__(self, "nvmlDeviceGetName")(handle)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return tuple(int(part) for part in os.environ.get("FAKE_CAPABILITY", "9.0").split("."))

def __getattr__(name):
    return getattr(Here(), name)
"""
VERSION = "__version__ = '2.11.0+cu130'\ndebug = False\ncuda = '13.0'\ngit_version = 'abc'\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages: torch with its ptxas, and the driver's library."""
    site = tmp_path / "site"
    (site / "torch" / "bin").mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    (site / "torch" / "version.py").write_text(VERSION)
    (site / "torch" / "bin" / "ptxas").write_text("#!/bin/sh\n")
    (site / "torch" / "bin" / "ptxas").chmod(0o755)
    (site / "pynvml.py").write_text(BINDING)
    return site


@pytest.fixture
def release(tmp_path: Path, site: Path) -> Published:
    """Built on the first board of the double: a whole H200."""
    host = Host(environ={"CUDA_VISIBLE_DEVICES": "0"}, nvml=Binding(), python_path=(str(site),))
    parts = builder_fingerprint("cuda", False, host).parts
    return publish_release(tmp_path, device="cuda", fingerprint=parts, variables=pinned_variables("cuda"))


def restore(base: Path, site: Path, release: Published, visible: str = "0", **variables: str) -> Ran:
    env = environment(base, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID", **variables)
    env["PYTHONPATH"] = f"{site}:{REPOSITORY}"
    return run_restore(base, release.store.url, "--name", release.name, "--strict", *command(), env=env)


def test_case_h5_a_service_on_the_same_gpu_gets_the_cache_and_torchs_ptxas(
    tmp_path: Path, site: Path, release: Published
) -> None:
    ran = restore(tmp_path, site, release)
    assert ran.code == 0, ran.err
    assert files_below(release.root) == release.restored_bytes(release.root)
    assert service_environment(ran)["TRITON_PTXAS_PATH"] == str(site / "torch" / "bin" / "ptxas")
    again = restore(tmp_path, site, release)
    assert again.line["outcome"] == "present"
    assert service_environment(again)["TRITON_PTXAS_PATH"] == str(site / "torch" / "bin" / "ptxas")


@pytest.mark.parametrize(
    ("visible", "variables", "words"),
    [
        ("0", {"FAKE_DRIVER": "570.10"}, "driver: wanted >= 580.65.06, found 570.10 (lower than the builder's)"),
        ("0", {"FAKE_CAPABILITY": "10.0"}, "gpu_capability: wanted 9.0, found 10.0"),
        ("0", {"FAKE_GPU": "NVIDIA H100 80GB HBM3"}, "gpu_name: wanted NVIDIA H200, found NVIDIA H100 80GB HBM3"),
        ("MIG-3", {}, "gpu_mig: wanted none, found 1g.18gb"),
        ("1", {}, "gpu_mig: wanted none, found 1g.18gb"),
        ("0,1", {}, "several visible models: choose one kind by CUDA_VISIBLE_DEVICES"),
        ("GPU-0", {"FAKE_DRIVER": "580.65.05"}, "driver: wanted >= 580.65.06, found 580.65.05"),
        ("", {}, "gpu_name: wanted NVIDIA H200, found none"),
    ],
)
def test_case_h5_a_gpu_or_driver_that_does_not_fit_is_refused_with_both_numbers_before_a_pack_is_fetched(
    tmp_path: Path, site: Path, release: Published, visible: str, variables: dict[str, str], words: str
) -> None:
    shutil.rmtree(tmp_path / "store" / "v1" / "artifacts")
    ran = restore(tmp_path, site, release, visible, **variables)
    assert (ran.code, ran.out) == (MISMATCH, "")
    assert words in ran.line["reason"]
    assert not Path(release.root).exists()


@pytest.mark.parametrize(("visible", "driver"), [("GPU-0", "580.65.06"), ("0", "590.1")])
def test_case_h5_the_same_gpu_by_another_name_and_a_newer_driver_fit(
    tmp_path: Path, site: Path, release: Published, visible: str, driver: str
) -> None:
    ran = restore(tmp_path, site, release, visible, FAKE_DRIVER=driver)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    "text",
    [
        "raise RuntimeError('damaged')",
        "def nvmlInit(",
        "",
        "class NVMLError(Exception): pass\ndef nvmlInit(): raise OSError('no library')",
    ],
    ids=["not importable", "cut off", "another package", "without library"],
)
def test_case_h5_a_damaged_binding_of_the_driver_is_a_machine_without_one_and_no_bug(
    tmp_path: Path, site: Path, release: Published, text: str
) -> None:
    (site / "pynvml.py").write_text(text)
    ran = restore(tmp_path, site, release)
    assert ran.code == MISMATCH and "gpu_name: wanted NVIDIA H200, found none" in ran.line["reason"]


def test_case_h5_a_driver_that_hangs_holds_no_service(tmp_path: Path, site: Path, release: Published) -> None:
    (site / "pynvml.py").write_text("import signal\ndef nvmlInit(): signal.sigwait([signal.SIGUSR1])\n")
    env = environment(tmp_path, CUDA_VISIBLE_DEVICES="0", PYTHONPATH=f"{site}:{REPOSITORY}")
    ran = run_restore(tmp_path, release.store.url, "--name", release.name, "--deadline", "1", *command(), env=env)
    assert ran.code == 0 and ran.line["outcome"] == "cold" and "not restored within 1 second" in ran.line["reason"]
