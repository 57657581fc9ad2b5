"""`python -m fedge`: the `fedge` command."""

import sys

from fedge.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
