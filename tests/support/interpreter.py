"""Test Triton programs without a GPU: run them in its interpreter, in a separate process, and compile them for GPUs.

Triton 3.6, the version for torch 2.11, reads a loop's bound by `int` of a one-dimensional array. numpy 2.5 accepts only
zero-dimensional ones, which Triton 3.7 uses. So `mend` reads the bound by `item`, which works in all versions.
"""

from __future__ import annotations

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

HERE = Path(__file__).parent


def results(script: str, *arguments: str, **variables: str) -> dict[str, str | None]:
    """Run a script of this folder in a process, as the interpreter must be chosen before Triton is imported."""
    command = [sys.executable, str(HERE / script), *arguments]
    environment = {**os.environ, **variables, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
    mend()
    return {name: outcome(check, "cpu") for name, check in checks.items()}


def assert_in_registers(binary: Any, most: int = 255) -> None:
    """Assert that a compiled program uses at most `most` registers a thread and spills none to the stack."""
    import triton  # may be missing where nothing is compiled

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert found and int(found[1]) <= most and found[2] == "0", said.stdout


def mend() -> None:
    """Patch the interpreter; call this before a program first runs in it."""
    from triton.runtime import interpreter  # may be missing if no program runs

    own = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        own(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
