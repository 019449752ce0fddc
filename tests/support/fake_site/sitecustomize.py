"""Installs the fake CUDA device after torch's import, in every Python process with this folder on PYTHONPATH."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

SUPPORT = str(Path(__file__).resolve().parents[1])


class _WithDevice:
    """Finds torch as usual, and installs the device after its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_install(module: Any) -> None:
            run(module)
            sys.path.append(SUPPORT)
            try:
                import fake_device
            finally:
                sys.path.remove(SUPPORT)
            fake_device.install()

        spec.loader.exec_module = run_and_install  # type: ignore[method-assign]
        return spec


if "FAKE_CUDA" in os.environ:
    sys.meta_path.insert(0, _WithDevice())
