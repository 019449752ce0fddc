"""``python -m dpbench``."""

import sys

from dpbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
