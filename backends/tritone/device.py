"""Where the engines of a stage run, as `device:` in a deploy file says it.

    cpu               on the CPU
    gpu               on every GPU that the server sees, `instances` engines on each (Triton's own rule)
    gpu:1             on that one
    [gpu:0, gpu:1]    one engine over both, where the engine can be spread (tensor parallel)

Numbers are those of nvidia-smi, counted among CUDA_VISIBLE_DEVICES where that is set. An engine process is
shown its own GPUs and no other, so that it holds no memory elsewhere and counts them from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritone.errors import ConfigError

CURE = "give cpu, gpu, gpu:<number>, or a list such as [gpu:0, gpu:1]"


@dataclass(frozen=True)
class Device:
    """CPU, or some GPUs."""

    is_gpu: bool
    gpus: tuple[int, ...] = ()  # numbers; none of a GPU: each that there is

    @classmethod
    def parse(cls, value: str | Sequence[str], where: str) -> Device:
        """ConfigError naming `where` and the value."""
        words = [value] if isinstance(value, str) else list(value)
        if words in (["cpu"], ["gpu"]) and isinstance(value, str):
            return cls(is_gpu=value == "gpu")
        numbers = [re.fullmatch(r"gpu:(\d{1,3})", word) for word in words]
        gpus = tuple(int(match.group(1)) for match in numbers if match is not None)
        if not gpus or len(gpus) != len(words):
            raise ConfigError(f"{where} is {_shown(value)}", CURE)
        if len(set(gpus)) != len(gpus):
            raise ConfigError(f"{where} is {_shown(value)}", "name each GPU once")
        return cls(True, gpus)

    @property
    def is_spread(self) -> bool:
        """One engine over several GPUs."""
        return len(self.gpus) > 1

    def __str__(self) -> str:
        if not self.gpus:
            return "gpu" if self.is_gpu else "cpu"
        return "+".join(f"gpu:{number}" for number in self.gpus)


def visible(gpus: Sequence[int], environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a process that is to see these GPUs and no other.

    environ: of the process that counts them so, which may itself see only some of the machine's.
    """
    seen = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    if not seen:
        return ",".join(map(str, gpus))
    missing = [number for number in gpus if number >= len(seen)]
    if missing:
        raise ConfigError(
            f"there is no gpu:{missing[0]} among CUDA_VISIBLE_DEVICES={','.join(seen)}",
            "lower `device:` in deploy.yaml, or show the server more GPUs",
        )
    return ",".join(seen[number] for number in gpus)


def _shown(value: str | Sequence[str]) -> str:
    return f"'{value}'" if isinstance(value, str) else f"[{', '.join(map(str, value))}]"
