"""`python -m piecegraph`: the command `piecegraph`, for an interpreter whose scripts are not on the path."""

import sys

from piecegraph.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
