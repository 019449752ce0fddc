"""Names this machine in records: by the environment variable DPBENCH_HOST, else by its network name."""

import os
import socket

VARIABLE = "DPBENCH_HOST"


def named_host() -> str | None:
    """The name given by the user, or None."""
    return os.environ.get(VARIABLE, "").strip() or None


def host_name() -> str:
    """The name in records and fingerprints."""
    return named_host() or socket.gethostname()
