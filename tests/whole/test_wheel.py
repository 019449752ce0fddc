"""What is built has all that is needed, and runs without the checkout beside it."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode and "Could not find a version" in done.stderr + done.stdout:
        pytest.skip("no package index for the build's own requirements")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_wheel_and_an_sdist_build_and_the_wheel_runs_alone(tmp_path):
    clean = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clean)], check=True)
    pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path / "dist"), str(clean))
    hook = "import setuptools.build_meta as b; b.build_sdist('../dist')"
    pip("install", "--target", str(tmp_path / "tools"), "setuptools>=77")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "tools")}
    subprocess.run([sys.executable, "-c", hook], cwd=clean, env=environ, check=True, capture_output=True)
    [sdist] = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("clipping/native/noise.c") for name in names) and any("README" in name for name in names)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environ = {**os.environ, "PYTHONPATH": str(site)}
    code = "import dpbench, sys; assert dpbench.__file__.startswith(sys.argv[1]), dpbench.__file__"
    subprocess.run([sys.executable, "-c", code, str(site)], cwd=tmp_path, env=environ, check=True)
    run = [sys.executable, "-m", "dpbench", "run", "accountants", "--smoke", "--output", "out"]
    done = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and list((tmp_path / "out").rglob("*.svg")), done.stderr
    check = [sys.executable, "-m", "dpbench", "check", "--model", "cnn", "--backend", "bk_mixed"]
    done = subprocess.run(check, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "ok" in done.stdout, done.stderr
