"""`python -m tritone_client` is the command `tritone`."""

import sys

from tritone_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
