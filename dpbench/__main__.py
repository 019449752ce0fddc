"""``python -m dpbench``."""

import sys

if __name__ == "__main__":
    try:
        from dpbench.cli import main  # here, for whoever ends it meanwhile

        sys.exit(main())
    except KeyboardInterrupt:
        print("dpbench: interrupted", file=sys.stderr)
        sys.exit(130)
