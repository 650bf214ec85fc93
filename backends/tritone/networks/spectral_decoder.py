"""A convolutional decoder that streams: latent frames in, spectra out, exact for any chunking.

    latent [130] ─► convolution k7 ─► 8 × ConvNeXt block ─► norm ─► head ─► 5 spectra × [601]
                                          │
             x ─► depthwise k7 ─► norm ─► widen ─► GELU ─► narrow ─► × gain ─► + x

A *segment* is what was synthesised in one piece; every convolution sees zeros before and after it, at its own
input. So each keeps the last inputs that it still needs (its *tail*, at most k - 1 frames), and an output
appears as soon as its window is full: the decoder runs `lookahead_frames` behind its input and is caught up
by the zeros at the segment's end.

Time is the first axis, and the streams of a batch lie end to end on it: only the convolutions know where one
stream ends, and everything else runs once over all frames, whatever each stream's phase and chunk length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_SPECTRA = 5  # harmonic magnitude and phase, noise magnitude, free magnitude and phase


@dataclass(frozen=True)
class SpectralConfig:
    latent_channels: int
    channels: int
    hidden_channels: int
    num_blocks: int
    kernel_frames: int  # odd
    bins: int  # of one spectrum
    norm_epsilon: float

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """From a checkpoint's config.json, which may say more."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})

    @property
    def lookahead_frames(self) -> int:
        """How many frames of input must follow a frame before its spectra are known."""
        return (1 + self.num_blocks) * (self.kernel_frames // 2)


@dataclass
class DecoderState:
    """One stream's place in its segment."""

    # By convolution: its last inputs, [0 to k - 1, C]; None before a segment's first frame.
    tails: list[Tensor | None]


@dataclass(frozen=True)
class Piece:
    """What one stream brings to a call."""

    latent: Tensor  # [F, latent_channels], F >= 0
    state: DecoderState
    segment_end: bool


@dataclass(frozen=True)
class _Joined:
    """The inputs of one convolution, streams end to end, each behind its tail."""

    frames: Tensor  # [sum of spans, C]
    spans: list[int]  # frames of each stream in it, tail and padding included
    ready: list[int]  # of these, full windows
    starts: Tensor | None  # int64 [sum of ready]: first frame of each full window; None: all windows are full


class SpectralDecoder(nn.Module):
    def __init__(self, config: SpectralConfig) -> None:
        super().__init__()
        self.config = config
        self.enter = nn.Conv1d(config.latent_channels, config.channels, config.kernel_frames)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.channels, config.norm_epsilon)
        self.head = nn.Linear(config.channels, NUM_SPECTRA * config.bins)

    def new_state(self) -> DecoderState:
        return DecoderState([None] * (1 + self.config.num_blocks))

    def forward(self, pieces: Sequence[Piece]) -> tuple[Tensor, list[int]]:
        """Advance each piece's state by its frames.

        Returns the spectra that are ready, [sum of counts, NUM_SPECTRA, bins], and the count of each piece.
        """
        kernel = self.config.kernel_frames
        counts = [len(piece.latent) for piece in pieces]
        joined = _join(torch.cat([piece.latent for piece in pieces]), counts, pieces, 0, kernel)
        x, counts = self._enter(joined), joined.ready
        for index, block in enumerate(self.blocks, start=1):
            if not len(x) and not any(piece.segment_end for piece in pieces):
                break  # nothing gets further than this, and the tails beyond stay as they are
            joined = _join(x, counts, pieces, index, kernel)
            x, counts = block(joined), joined.ready
        return self.head(self.norm(x)).view(len(x), NUM_SPECTRA, self.config.bins), counts

    def _enter(self, joined: _Joined) -> Tensor:
        windows = _windows(joined, self.config.kernel_frames)  # [N, C, k]
        return functional.linear(windows.flatten(1), self.enter.weight.flatten(1), self.enter.bias)


class _Block(nn.Module):
    def __init__(self, config: SpectralConfig) -> None:
        super().__init__()
        self.depthwise = _Depthwise(config.channels, config.kernel_frames)
        self.norm = nn.LayerNorm(config.channels, config.norm_epsilon)
        self.widen = nn.Linear(config.channels, config.hidden_channels)
        self.narrow = nn.Linear(config.hidden_channels, config.channels)
        self.gain = nn.Parameter(torch.ones(config.channels))

    def forward(self, joined: _Joined) -> Tensor:
        """Full windows of `joined` → [sum of ready, C]."""
        x = self.depthwise(joined)
        x = self.narrow(functional.gelu(self.widen(self.norm(x))))
        return torch.addcmul(self.depthwise.centres(joined), x, self.gain)


class _Depthwise(nn.Module):
    """One filter a channel, as k multiply-adds along the time axis: a third of a grouped Conv1d's time."""

    def __init__(self, channels: int, kernel_frames: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, kernel_frames))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, joined: _Joined) -> Tensor:
        count = max(0, len(joined.frames) - self.weight.shape[1] + 1)
        taps = self.weight.T
        out = torch.addcmul(self.bias, joined.frames[:count], taps[0])
        for offset in range(1, len(taps)):
            out.addcmul_(joined.frames[offset : offset + count], taps[offset])
        return out if joined.starts is None else out[joined.starts]

    def centres(self, joined: _Joined) -> Tensor:
        """The frame in the middle of each full window."""
        half = self.weight.shape[1] // 2
        if joined.starts is None:
            return joined.frames[half : half + sum(joined.ready)]
        return joined.frames[joined.starts + half]


def _join(x: Tensor, counts: Sequence[int], pieces: Sequence[Piece], index: int, kernel: int) -> _Joined:
    """Each stream's inputs `x` [sum of counts, C] behind its tail of convolution `index`; moves the tail."""
    padding = x.new_zeros(kernel // 2, x.shape[1])
    parts: list[Tensor] = []
    spans: list[int] = []
    for new, piece in zip(torch.split(x, list(counts)), pieces, strict=True):
        tail = piece.state.tails[index]
        mine = [padding if tail is None else tail, new, *([padding] if piece.segment_end else [])]
        parts += mine
        spans.append(sum(map(len, mine)))
    frames = torch.cat(parts)
    ready = [max(0, span - kernel + 1) for span in spans]
    for inputs, piece in zip(torch.split(frames, spans), pieces, strict=True):
        # A tail is copied: as a view it would keep the whole batch alive.
        piece.state.tails[index] = None if piece.segment_end else inputs[-(kernel - 1) :].clone()
    starts = None
    if len(spans) > 1:
        ranges, begin = [], 0
        for span, count in zip(spans, ready, strict=True):
            ranges.append(torch.arange(begin, begin + count, device=x.device))
            begin += span
        starts = torch.cat(ranges)
    return _Joined(frames, spans, ready, starts)


def _windows(joined: _Joined, kernel: int) -> Tensor:
    """Full windows, [sum of ready, C, kernel]."""
    if len(joined.frames) < kernel:
        return joined.frames.new_zeros(0, joined.frames.shape[1], kernel)
    windows = joined.frames.unfold(0, kernel, 1)
    return windows if joined.starts is None else windows[joined.starts]
