"""Libraries of kernels in C: whole, this user's own, and said to be there only where they are."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipping import cache
from clipping.native import library
from dpbench.execution.machines import Machine
from dpbench.records import environment
from dpbench.trials import EpsilonTrial, StepTrial


def forget() -> None:
    library._load.cache_clear()
    environment.version_of.cache_clear()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder of libraries, and a process that knows of none."""
    monkeypatch.setattr(library, "_folder", lambda: tmp_path / "kept")
    forget()
    yield tmp_path / "kept"
    forget()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library, compiled once for all of these tests."""
    kept = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_folder", lambda: kept)
        forget()
        try:
            library.load("float")
        except library.NoLibrary as missing:
            pytest.skip(str(missing))
    return next(kept.iterdir())


@pytest.fixture
def made(folder: Path, compiled: Path) -> Path:
    """A copy of it in the folder, which nobody has loaded yet."""
    folder.mkdir(mode=0o700)
    return Path(shutil.copy(compiled, folder))


def test_only_what_would_use_kernels_is_told_that_there_are_none(folder: Path, monkeypatch: pytest.MonkeyPatch):
    step = StepTrial(model="cnn", backend="bk_mixed", batch_size=8)
    epsilon = EpsilonTrial(accountant="rdp", sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, steps=10)
    monkeypatch.setenv("CC", "")
    assert "expected a compiler" in str(environment.kernels_missing("cpu", [epsilon, step]))
    assert environment.kernels_missing("cpu", [epsilon]) is environment.kernels_missing("cuda", [step]) is None


DAMAGE = {
    "half": lambda data: data[: len(data) // 2],
    "a changed byte": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "no end": lambda data: data[: data.rindex(b"\ndpbench ")],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_library_that_is_not_whole_is_compiled_anew(
    made: Path, compiled: Path, how: str, monkeypatch: pytest.MonkeyPatch
):
    made.write_bytes(DAMAGE[how](made.read_bytes()))
    assert library._whole(made) is None
    monkeypatch.setattr(library, "_compile", lambda compiler, arguments, path: shutil.copy(compiled, path))
    assert library.load("float").kernels.gram_norm and made.read_bytes() == compiled.read_bytes()


def test_a_whole_one_is_found_again_and_not_compiled(made: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_compile", None)
    assert library.load("float").digest == library._whole(made)[0]


def test_one_that_was_compiled_and_is_not_whole_is_not_loaded(made: Path, monkeypatch: pytest.MonkeyPatch):
    made.write_bytes(b"")
    monkeypatch.setattr(library, "_compile", lambda compiler, arguments, path: None)
    with pytest.raises(library.NoLibrary, match="not whole"):
        library.load("float")


def test_a_folder_that_others_may_write_is_refused(made: Path):
    made.parent.chmod(0o775)
    with pytest.raises(library.NoLibrary, match=r"others may write to .*: chmod go-w"):
        library.load("float")
    assert "others may write" in str(library.trouble()) and library.version() is None


def test_a_file_that_others_may_write_is_refused(made: Path):
    made.chmod(0o666)
    with pytest.raises(library.NoLibrary, match="others may write to it: delete it"):
        library.load("float")


def test_a_link_in_place_of_the_file_is_refused(made: Path, tmp_path: Path):
    elsewhere = made.rename(tmp_path / "elsewhere.so")
    made.symlink_to(elsewhere)
    with pytest.raises(library.NoLibrary, match="symbolic link"):
        library.load("float")


def test_a_folder_of_another_user_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(library.NoLibrary, match="belongs to another user"):
        library.load("float")


def test_a_folder_above_that_others_may_write_is_refused_unless_they_cannot_come_there():
    with tempfile.TemporaryDirectory() as private:
        try:
            cache.own_folder(Path(private))
        except cache.Untrusted:
            pytest.skip("others may write to where temporary files lie")
        kept = Path(private, "open", "kept")
        kept.mkdir(mode=0o700, parents=True)
        kept.parent.chmod(0o777)
        assert cache.own_folder(kept) == kept.resolve()
        Path(private).chmod(0o755)
        with pytest.raises(cache.Untrusted, match=f"others may write to {kept.parent}"):
            cache.own_folder(kept)


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("  ", "got '  '"),
        ('cc "', "No closing quotation"),
        ("/no/such", "not found"),
    ],
)
def test_a_compiler_that_cannot_be_used_is_told_of_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, said: str
):
    monkeypatch.setenv("CC", compiler)
    line = library.trouble()
    assert line is not None and said in line and "torch's own operations remain" in line and "\n" not in line
    assert library.version() is None and set(library.describe()["float"]) == {"reason"}


def test_a_machine_without_a_compiler_is_nothing_to_tell(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    assert library.trouble() is None and library.version() is None
    assert library.describe()["double"] == {"reason": "there is no C compiler cc"}


def test_whether_kernels_run_is_part_of_the_fingerprint(made: Path, monkeypatch: pytest.MonkeyPatch):
    step = StepTrial(model="cnn", backend="bk_mixed", batch_size=8)
    epsilon = EpsilonTrial(accountant="rdp", sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, steps=10)
    machine, found = Machine("here", "CPU"), []
    for compiler in ("cc", "cc -O1", "false"):
        monkeypatch.setenv("CC", compiler)
        forget()
        found.append((machine.fingerprint(step), machine.fingerprint(epsilon)))
    steps, accounted = zip(*found, strict=True)
    assert len(set(steps)) == 3 and len(set(accounted)) == 1


def test_the_environment_says_what_was_loaded(made: Path, monkeypatch: pytest.MonkeyPatch):
    """The compiler and the digest of each library, or why there is none."""
    for compiler, expected in (("cc", library._whole(made)[0][:16]), ("false", "false does not compile them")):
        monkeypatch.setenv("CC", compiler)
        forget()
        assert expected in str(environment.torch_facts(environment.TorchFacts(device="cpu"))["kernels"])
