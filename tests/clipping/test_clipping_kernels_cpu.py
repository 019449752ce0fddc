"""Kernels in C: libraries that are whole and this user's own, exact for every shape, the same on any number of threads.

Where they cannot be, the formulas remain, and a line says why.
"""

import itertools
import math
import os
import platform
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap

from clipping import cache, load_backend
from clipping.accel import cpu
from clipping.native import library
from clipping.rules.pixel_gram import Geometry, compiled_norms, patches
from dpbench.execution.machines import Machine
from dpbench.records import environment
from dpbench.trials import EpsilonTrial, StepTrial

STEP = StepTrial(model="cnn", backend="bk_mixed", batch_size=8)
EPSILON = EpsilonTrial(accountant="rdp", sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, steps=10)


def forget() -> None:
    cpu._library.cache_clear()
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
    monkeypatch.setenv("CC", "")
    assert "expected a compiler" in str(environment.kernels_missing("cpu", [EPSILON, STEP]))
    assert environment.kernels_missing("cpu", [EPSILON]) is environment.kernels_missing("cuda", [STEP]) is None


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


UNTRUSTED = {
    "a folder that others may write": (lambda made, _: made.parent.chmod(0o775), r"others may write to .*: chmod go-w"),
    "a file that others may write": (lambda made, _: made.chmod(0o666), "others may write to it: delete it"),
    "a link": (lambda made, _: made.symlink_to(made.rename(made.parents[1] / "elsewhere.so")), "symbolic link"),
    "a folder of another user": (
        lambda _, patch: patch.setattr(cache.os, "geteuid", lambda: os.getuid() + 1),
        "belongs to another user",
    ),
}


@pytest.mark.parametrize("what", UNTRUSTED)
def test_what_others_could_have_written_is_refused(what: str, made: Path, monkeypatch: pytest.MonkeyPatch):
    change, said = UNTRUSTED[what]
    change(made, monkeypatch)
    with pytest.raises(library.NoLibrary, match=said):
        library.load("float")
    if what.startswith("a folder"):  # in which no other library can be made
        assert library.trouble() is not None and library.version() is None


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
    ("compiler", "said"), [("  ", "got '  '"), ('cc "', "No closing quotation"), ("/no/such", "not found")]
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


def test_whether_kernels_run_is_part_of_the_fingerprint(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "small.c").write_text("REAL one(void) { return 1; }\n")
    monkeypatch.setattr(library, "SOURCES", [tmp_path / "small.c"])
    machine, found = Machine("here", "CPU"), []
    for compiler in ("cc", "cc -O1", "false"):
        monkeypatch.setenv("CC", compiler)
        forget()
        found.append((machine.fingerprint(STEP), machine.fingerprint(EPSILON)))
    steps, accounted = zip(*found, strict=True)
    assert len(set(steps)) == 3 and len(set(accounted)) == 1


def test_the_environment_says_what_was_loaded(made: Path, monkeypatch: pytest.MonkeyPatch):
    """The compiler and the digest of each library, or why there is none."""
    monkeypatch.setattr(library, "REALS", {"float": 4})
    for compiler, expected in (("cc", library._whole(made)[0][:16]), ("false", "false does not compile them")):
        monkeypatch.setenv("CC", compiler)
        forget()
        assert expected in str(environment.torch_facts(environment.TorchFacts(device="cpu"))["kernels"])


LIBRARY = pytest.mark.skipif(not cpu.supported(torch.empty(0)), reason="no C compiler that could make the kernels")


def compiled_norm(x: torch.Tensor, g: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    return compiled_norms(x, g, geometry, (0.0, 0.0))[:, 0]


def gram_norm(a: Tensor, g: Tensor) -> Tensor:
    return cpu.gram_norm_and_reach(a, g, (0.0, 0.0))[:, 0]


def require_close(found: Tensor, expected: Tensor, rtol: float, said: str) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, msg=lambda text: f"{said}: {text}")


def exact_linear(a: Tensor, g: Tensor) -> Tensor:
    return torch.einsum("ntp,ntd->npd", g.double(), a.double()).square().sum((1, 2))


def random_layer(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions and features around the sides of a tile, the width of vectors and a thread's part."""
    pick = random.Random(seed)
    count, features = pick.randint(1, 4), pick.choice([pick.randint(1, 40), 64, 16])
    positions = pick.choice([pick.randint(1, 40), 65, pick.randint(cpu.PART, 2 * cpu.PART + 9)])
    a = torch.randn(count, positions, features, dtype=dtype)
    if seed % 3 == 1:
        a = a.transpose(1, 2).contiguous().transpose(1, 2)
    if seed % 3 == 2:
        a = a[:1].expand(count, -1, -1)
    return a, torch.randn(count, positions, pick.randint(1, 40), dtype=dtype)


def require_exact(seed: int, dtype: torch.dtype, rtol: float) -> None:
    """Norms and reaches of narrower numbers are float32."""
    torch.manual_seed(seed)
    wide, lost = torch.promote_types(dtype, torch.float32), (1e-3 * (seed % 4), 2e-3 * (seed % 4))
    a, g = (each.to(dtype) for each in random_layer(seed, wide))
    found = cpu.gram_norm_and_reach(a, g, lost)
    assert found.shape == (len(a), 3) and found.dtype == wide
    require_close(found[:, 0].double(), exact_linear(a, g), rtol, f"seed {seed}")
    of_a, of_g = a.double().norm(dim=2), g.double().norm(dim=2)
    reach = torch.stack([(of_a * of_g).sum(1), lost[0] * of_a.sum(1) + lost[1] * of_g.sum(1)], dim=1)
    require_close(found[:, 1:].double(), reach, rtol, f"reach of seed {seed}")


@LIBRARY
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-11), *((dtype, 2e-5) for dtype in (torch.float32, torch.bfloat16))]
)
def test_norms_of_linear_layers_are_exact(dtype: torch.dtype, rtol: float):
    for seed in range(40 if dtype == torch.float64 else 12):
        require_exact(seed, dtype, rtol)


@LIBRARY
@pytest.mark.parametrize(
    ("size", "stride"), [((16, 16), 1), ((9, 7), 2), ((1, 1), 1), ((33, 2), 3), ((33, 2), 1), ((16, 16), 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_images_are_read_as_they_lie_in_memory(dtype: torch.dtype, size: tuple[int, int], stride: int):
    """Any strides; the same bits as of a copy."""
    geometry, sides = Geometry([3, 3], [stride] * 2, [1, 1], [1, 1]), [(n - 1) // stride + 1 for n in size]

    def laid_out(channels: int, rows: int, columns: int) -> list[Tensor]:
        return [
            torch.randn(3, channels, rows, columns).to(memory_format=torch.channels_last).to(dtype),
            torch.randn(1, channels, rows, columns).to(dtype).expand(3, -1, -1, -1),
            torch.randn(3, channels, columns, rows).to(dtype).transpose(2, 3),
            torch.randn(3, 2 * channels, rows + 3, 2 * columns).to(dtype)[:, ::2, 2:-1, 1::2],
            torch.randn(3, channels, 1, 1).to(dtype).expand(-1, -1, rows, columns),
        ]

    for x, g in itertools.product(laid_out(5, *size), laid_out(6, *sides)):
        found = compiled_norms(x, g, geometry, (0.25, 0.5))
        assert torch.equal(found, compiled_norms(x.contiguous(), g.contiguous(), geometry, (0.25, 0.5)))


@LIBRARY
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 3), (17, 4), (9,)])
@pytest.mark.parametrize(
    ("geometry", "beyond"),
    [
        *(((3, 1, 1, 1), False), ((3, 2, 1, 1), False), ((2, 3, 3, 2), False), ((1, 2, 0, 1), False)),
        (((3, 2), (2, 1), (0, 1), (2, 3)), True),
    ],
)
def test_reaches_of_convolutions(size: tuple[int, ...], geometry: tuple[Any, ...], beyond: bool):
    """On the diagonals of Gram matrices of pixels, and from norms of pixels alone.

    Where the image has pixels beyond the output, the diagonals have them in what operands lose: an upper bound.
    """
    fields = [[n] * len(size) if isinstance(n, int) else list(n[: len(size)]) for n in geometry]
    sides = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(size, *fields, strict=True)]
    if min(sides) < 1:
        pytest.skip("the kernel does not fit")
    x, g = torch.randn(3, 5, *size, dtype=torch.float64), torch.randn(3, 7, *sides, dtype=torch.float64)
    a = patches(x, Geometry(*fields)).reshape(3, 5 * math.prod(fields[0]), -1).norm(dim=1)
    of, lost = g.flatten(2).norm(dim=1), (0.25, 0.5)
    want = torch.stack([(a * of).sum(1), (a * lost[0] + of * lost[1]).sum(1)], 1)
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        found = compiled_norms(x.to(dtype), g.to(dtype), Geometry(*fields), lost)[:, 1:].double()
        alone = cpu.patch_reach(x.norm(dim=1).to(dtype), of.to(dtype), fields, sides[-1], lost)
        if beyond:
            assert (found[:, 1] > want[:, 1] * (1 - rtol)).all()
            found[:, 1] = want[:, 1]
        for each in (found, alone.double()):
            torch.testing.assert_close(each, want, rtol=rtol, atol=0)


@LIBRARY
@pytest.mark.skipif(platform.machine() != "x86_64", reason="chooses among the vectors of x86 processors")
@pytest.mark.parametrize("narrower", [pytest.param("-mno-avx512f", marks=pytest.mark.slow), "-mno-avx"])
def test_exact_with_vectors_of_every_width(narrower: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", f"cc {narrower}")
    for dtype, rtol in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        assert cpu.supported(torch.empty(0, dtype=dtype))
        for seed in range(12):
            require_exact(seed, dtype, rtol)
        x = torch.randn(3, 5, 4, 4, dtype=dtype)
        rows = x.flatten(2).transpose(1, 2)
        found = compiled_norm(x, x, Geometry([1, 1], [1, 1], [0, 0], [1, 1]))
        torch.testing.assert_close(found.double(), exact_linear(rows, rows), rtol=rtol, atol=0)


@LIBRARY
def test_nothing_is_read_behind_the_end():
    """The last sample of the last channel ends where memory that is not a number begins."""
    for channels, side in ((1, 1), (3, 2), (5, 3), (2, 5)):
        numbers = torch.full((2 * channels * side * side + 64,), float("nan"), dtype=torch.float64)
        numbers[: 2 * channels * side * side] = torch.randn(2 * channels * side * side, dtype=torch.float64)
        x = numbers[: 2 * channels * side * side].view(2, channels, side, side)
        found = compiled_norm(x, x, Geometry([1, 1], [1, 1], [0, 0], [1, 1]))
        rows = x.flatten(2).transpose(1, 2)
        torch.testing.assert_close(found, exact_linear(rows, rows), rtol=1e-11, atol=0)
        torch.testing.assert_close(gram_norm(rows, rows), exact_linear(rows, rows), rtol=1e-11, atol=0)


@LIBRARY
def test_the_same_bits_on_any_number_of_threads():
    a, g = torch.randn(5, 1100, 33), torch.randn(5, 1100, 20)
    x, y, geometry = torch.randn(5, 40, 9, 9), torch.randn(5, 50, 9, 9), Geometry([3, 3], [1, 1], [1, 1], [1, 1])
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append((gram_norm(a, g), compiled_norm(x, y, geometry)))
    finally:
        torch.set_num_threads(threads)
    for linear, convolution in found[1:]:
        assert torch.equal(linear, found[0][0]) and torch.equal(convolution, found[0][1])


@LIBRARY
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_sample(bad: float):
    geometry = Geometry([3, 3], [1, 1], [1, 1], [1, 1])
    for channels, outputs, side in ((1, 40, 2), (40, 1, 2), (3, 5, 3), (2, 2, 5)):
        x, g = torch.randn(4, channels, side, side), torch.randn(4, outputs, side, side)
        rows = x.flatten(2).transpose(1, 2).contiguous(), g.flatten(2).transpose(1, 2).contiguous()
        want = compiled_norm(x, g, geometry), gram_norm(*rows)
        for tensor in (x, g, *rows):
            tensor[0] = bad
        found = compiled_norm(x, g, geometry), gram_norm(*rows)
        for exact, others in zip(want, found, strict=True):
            assert torch.equal(exact[1:], others[1:]) and not others[0].isfinite()


@LIBRARY
def test_fake_tensors_get_fake_results_and_wrapped_ones_are_left_alone():
    with FakeTensorMode():
        a = torch.empty(3, 5, 4)
        assert cpu.supported(a) and gram_norm(a, a).shape == (3,)
        x = torch.empty(3, 2, 6, 6)
        assert compiled_norm(x, x, Geometry([1, 1], [1, 1], [0, 0], [1, 1])).shape == (3,)
    assert not cpu.supported(torch.empty(2, device="meta")) and not cpu.supported(torch.zeros(2, dtype=torch.int64))
    seen: list[bool] = []
    vmap(lambda row: (seen.append(cpu.supported(row)), row)[1])(torch.zeros(2, 3))
    assert seen == [False]


@LIBRARY
def test_no_samples_or_no_positions():
    for shape in ((0, 5, 3), (2, 0, 3)):
        assert torch.equal(gram_norm(torch.zeros(shape), torch.zeros(shape)), torch.zeros(shape[0]))
    empty = torch.zeros(0, 3, 4, 4)
    assert compiled_norm(empty, empty, Geometry([1, 1], [1, 1], [0, 0], [1, 1])).shape == (0,)


def test_without_a_compiler_the_formulas_remain(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for compiler in ("no-such-compiler", "false", "cc --no-such-option"):
        forget()
        monkeypatch.setenv("CC", compiler)
        with pytest.warns(UserWarning, match="no kernels in C, torch's own operations remain: .*(found|compile)"):
            assert not cpu.supported(torch.empty(0))
        model = torch.nn.Linear(3, 2)
        with load_backend("bk_mixed")(model, lambda out, _: out.square().sum((1, 2)), verify=False) as backend:
            for _ in range(3):
                assert backend(torch.randn(4, 6, 3), torch.zeros(4)).norms.shape == (4,)
    assert not folder.exists() or not list(folder.iterdir())


def test_a_compiler_that_hangs_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*args: object, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired("cc", timeout)

    monkeypatch.setattr(library.subprocess, "run", run)
    with pytest.warns(UserWarning, match="longer than 60 s"):
        assert not cpu.supported(torch.empty(0))


def test_off_keeps_and_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_folder", cache.folder)
    monkeypatch.setenv("DPBENCH_CACHE", "off")
    assert cache.folder() is None and not cpu.supported(torch.empty(0))
