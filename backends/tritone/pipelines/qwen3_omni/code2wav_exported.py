"""Code2Wav by a file that `build/plans.py` wrote: what is the same whatever runtime runs it.

    checkpoint's plans/ ─► open ─► StepWaves ─► WaveEngine: streams in slots

Everything is float32, and the states of all streams are allocated at the start.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from tritone.engines.base import Placement
from tritone.engines.memory import Ground, Term
from tritone.networks.waveform_config import WaveformConfig
from tritone.pipelines.qwen3_omni.code2wav import WaveEngine, codec_config
from tritone.pipelines.qwen3_omni.code2wav_memory import exported_code2wav_terms
from tritone.pipelines.qwen3_omni.wave_steps import StepWaves


@dataclass(frozen=True)
class ExportedOptions:
    max_streams: Annotated[int, Meta(ge=1)] = 64  # more are refused UNAVAILABLE


class ExportedCode2Wav(WaveEngine):
    """Subclasses say how the file is opened and run."""

    Options = ExportedOptions

    @classmethod
    def memory(cls, ground: Ground, options: ExportedOptions) -> list[Term]:
        return exported_code2wav_terms(ground, options)

    @classmethod
    def _make_waves(cls, placement: Placement, options: ExportedOptions) -> StepWaves:
        return cls._open(placement, codec_config(placement.checkpoint), options.max_streams)

    @classmethod
    @abstractmethod
    def _open(cls, placement: Placement, config: WaveformConfig, max_streams: int) -> StepWaves:
        """The step on its runtime; ConfigError naming what is missing for it and what to do."""
