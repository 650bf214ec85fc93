"""Triton makes the shared memory of its stubs readable for every user of the machine; doors take that back.

tritonserver ──region in /dev/shm, mode 0644──► stub: mode 0600, before the first request
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

_REGION = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


def keep_private(maps: Path = Path("/proc/self/maps")) -> None:
    """Close the regions that this process maps to other users. Prompts, media and answers lie in them."""
    for path in set(_REGION.findall(maps.read_text())):
        with contextlib.suppress(OSError):
            if os.stat(path).st_uid == os.getuid():
                os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
