"""``python -m dpbench``."""

import sys

if __name__ == "__main__":
    try:
        from dpbench.cli import main

        sys.exit(main())
    except KeyboardInterrupt:  # while it was still importing
        print("dpbench: interrupted", file=sys.stderr)
        sys.exit(130)
