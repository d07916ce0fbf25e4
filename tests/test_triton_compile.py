"""Kernels compile for devices that are not there, and keep everything in registers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from interpreting import compiling_environment

SCRIPT = Path(__file__).with_name("compiling.py")


def compiled(tmp_path, *args) -> list:
    """(name, report) of every kernel."""
    environment = compiling_environment(tmp_path)
    run = subprocess.run([sys.executable, SCRIPT, *args], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    reports = json.loads(run.stdout.splitlines()[-1])
    assert reports
    return reports


@pytest.mark.quick
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_gluon_kernels_compile(arch, tmp_path):
    """Without a spill, on every version of Triton that we support: its names for all this differ.

    Except that 9 to 16 columns of 128 channels need every register that there is, and some of the addresses that
    compilers keep through the loop live on the stack: 2 (3.6, sm_80 only) to 12 (3.9, sm_90), of which a page of
    2,300 instructions loads 7.
    """
    for name, report in compiled(tmp_path, arch, "gluon"):
        assert report["STACK"] <= (64 if report["columns"] > 8 else 0), name
        assert report["LOCAL"] == 0, name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_compile(arch, tmp_path):
    reports = compiled(tmp_path, arch)
    if arch in ("sm_80", "sm_90"):
        for name, report in reports:
            assert report["STACK"] == 0, name
            assert report["LOCAL"] == 0, name
