"""`python -m primus_odc`: the command line without the console script, as torchrun's `-m` needs it."""

import sys

from primus_odc.cli import main

if __name__ == "__main__":
    sys.exit(main())
