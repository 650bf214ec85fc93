"""Make a virtual environment above the one that runs this, for what wants other versions of a few packages.

    new environment      what is installed there comes first: another numpy, what only it needs
        ▲
    this environment     everything else, torch and pip too; downloaded and kept once

python build/venv_above.py DIR

`DIR/bin/python -m pip install …` then passes over what this environment has in the version that is wanted. A
DIR that is there already is kept, and set above this environment again.
"""

from __future__ import annotations

import argparse
import sysconfig
import venv
from pathlib import Path

BELOW = "environment-below.pth"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a virtual environment above this one.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args(words).folder
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Added as a site, since editable installs are .pth files of their own.
    (packages / BELOW).write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
