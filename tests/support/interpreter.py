"""Test Triton programs without a GPU: run them in its interpreter, in a separate process, and compile them for GPUs.

Triton 3.6, the version for torch 2.11, reads a loop's bound by `int` of a one-dimensional array. numpy 2.5 accepts only
zero-dimensional ones, which Triton 3.7 uses. So `mend` reads the bound by `item`, which works in all versions.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from waiting import ROOT, python


def results(script: str, *arguments: str, **variables: str) -> dict[str, str | None]:
    """Run a script of this folder in a process, as the interpreter must be chosen before Triton is imported."""
    said = python(Path(__file__).with_name(script), *arguments, PYTHONPATH=str(ROOT), **variables)
    return json.loads(said.splitlines()[-1])


def outcome(check: Callable[..., None], *arguments: Any) -> str | None:
    """Return the error of a check as text, or None."""
    try:
        torch.manual_seed(0)
        check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def interpreted(checks: dict[str, Callable[[str], None]]) -> dict[str, str | None]:
    """Run each check on the CPU and return its outcome."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "expected TRITON_INTERPRET=1"
    os.environ["DPBENCH_CACHE"] = "off"  # no kernels in C: their reach has only an upper bound of R²
    mend()
    return {name: outcome(check, "cpu") for name, check in checks.items()}


def main(checks: dict[str, Callable[[str], None]], compilations: dict[str, Callable[[int], None]]) -> None:
    """The command line of a script: names of checks, by default all; or `compile CAPABILITY [END OF NAMES]`."""
    match sys.argv[1:]:
        case ["compile", capability, *ends]:
            made = {name: of for name, of in compilations.items() if name.endswith(tuple(ends) or "")}
            found = {name: outcome(of, int(capability)) for name, of in made.items()}
        case names:
            found = interpreted({name: checks[name] for name in names or checks})
    print(json.dumps(found))


def compiled(
    function: Any,
    capability: int,
    kinds: dict[str, str | tuple[str, ...]],
    constants: dict[str, Any],
    *,
    aligned: tuple[str, ...] = (),
    registers: int = 255,
    shared: int = 0,
    **options: int,
) -> None:
    """Compile a program for a GPU, present or not: within its registers and shared memory, and without a stack.

    No copy into shared memory overwrites an operand of a product that is still computed.

    `kinds` has the types of arguments that are neither int32 nor, named of_*, float32, or those of a tuple's pointers.
    Pointers are aligned, and so are arguments that begin with `aligned`. `shared` is in KiB; by default the GPU's.
    """
    import triton  # may be missing where nothing is compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, known, attributes = {}, {}, dict[tuple[int, ...], Any]()
    for position, name in enumerate(function.arg_names):
        kind = kinds.get(name, "fp32" if name.startswith("of_") else "i32")
        if name in constants:
            kind, known[(position,)] = "constexpr", constants[name]
        elif isinstance(kind, tuple):
            attributes |= {(position, i): [["tt.divisibility", 16]] for i in range(len(kind))}
        elif kind.startswith("*") or name.startswith(aligned):
            attributes[(position,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = ASTSource(function, signature, known, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert binary.metadata.shared <= 1024 * (shared or (227 if capability == 90 else 99)), binary.metadata.shared
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    assert not overwritten(binary.asm["ttgir"], binary.metadata.num_stages)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert found and int(found[1]) <= registers and found[2] == "0", said.stdout


def overwritten(text: str, stages: int) -> set[str]:
    """Operands of asynchronous products with fewer buffers than stages: the next copy goes to the one in use.

    Args:
        text: a program in TTGIR.
        stages: depths that it copies to shared memory at once.
    """
    if not re.search(r"{pendings = [1-9] : i32}", text):  # each product is waited for before the next copy
        return set()
    views = dict(re.findall(r"(%\w+) = ttg\.memdesc_(?:index|trans) (%\w+)", text))
    buffers = {name: int(n) for name, n in re.findall(r"(%\w+) = ttg\.local_alloc : .*memdesc<(\d+)x\d+x\d+x", text)}
    found = set()
    for operands in re.findall(r"ttng\.warp_group_dot (%\w+), (%\w+)", text):
        for name in operands:
            while name in views:
                name = views[name]
            found |= {name} if buffers.get(name, stages) < stages else set()  # a constant is allocated with its value
    return found


def mend() -> None:
    """Patch the interpreter; call this before a program first runs in it."""
    from triton.runtime import interpreter  # may be missing if no program runs

    own = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        own(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
