"""What is built has all that is needed, and runs without the checkout beside it."""

import subprocess
import sys
import tarfile
import zipfile
from functools import partial

import pytest
from waiting import ROOT, python


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
    python("-c", hook, cwd=clean, PYTHONPATH=str(tmp_path / "tools"))
    [sdist] = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("clipping/native/noise.c") for name in names) and any("README" in name for name in names)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    run = partial(python, cwd=tmp_path, PYTHONPATH=str(site))
    run("-c", "import dpbench, sys; assert dpbench.__file__.startswith(sys.argv[1]), dpbench.__file__", site)
    run("-m", "dpbench", "run", "accountants", "--smoke", "--output", "out")
    assert list((tmp_path / "out").rglob("*.svg"))
    assert "ok" in run("-m", "dpbench", "check", "--model", "cnn", "--backend", "bk_mixed")
