"""What this machine is called in records: by the environment variable DPBENCH_HOST, else as the network calls it."""

from __future__ import annotations

import os
import socket

VARIABLE = "DPBENCH_HOST"


def named_host() -> str | None:
    """The name that a person gave this machine; None without one."""
    return os.environ.get(VARIABLE, "").strip() or None


def host_name() -> str:
    """The name in records and fingerprints."""
    return named_host() or socket.gethostname()
