"""A codec decoder that streams: frames of codes in, samples out, equal to the whole decode for any chunking.

    codes [B, n, Q] ─► waveform_reader.py, each frame sees the last W ─► rows [B, n, H]
      rows ─► for each ratio r: a linear map to r rows, ConvNeXt block ─► convolution k7 ─► channels [B, C, T]
      channels ─► for each rate r: snake, transposed convolution ×r, 3 residual units ─► snake, convolution k7
               ─► samples [B, n · samples_per_frame]

Nothing in it looks back further than a fixed span, so a stream needs as *memory* just that: keys and values
of the last W - 1 frames for each layer of the reader, and the last inputs (the *tail*) of each convolution.

A transposed convolution of kernel 2r and stride r, cut by r on both sides, needs an input's successor to give
its r outputs. Run as a convolution over (predecessor, input) it gives them one input later, and ahead of a
stream's first output come r columns that belong to no sample. They are the stream's *lead*: it grows from
rate to rate, is kept at zero (what the whole decode pads with), and is `missing_samples` long at the end. So
streams of any age share a pass. The last `missing_samples` of a stream never appear, as in the whole decode.

`forward` takes pieces as they come, in passes of equally long ones. `step` is one pass in fixed shapes, a
pure function of tensors: what a graph can hold.

ConvNeXt: Liu et al. 2022 (arXiv 2201.03545); blocks around snakes: BigVGAN (arXiv 2206.04658).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.networks.causal_layers import Convolution, Layout, Memory, Snake, Source, Upsampling
from tritone.networks.linear import Linear
from tritone.networks.waveform_config import MAX_BATCH_FRAMES, MAX_PASS_FRAMES, WaveformConfig
from tritone.networks.waveform_pass import EvenPass, PaddedPass, Pass
from tritone.networks.waveform_reader import Reader
from tritone.networks.weights import Weights

_KERNEL = 7
_DILATIONS = (1, 3, 9)  # of a block's residual units
NORM_EPSILON = 1e-6  # of a ConvNeXt block


@dataclass
class WaveformState:
    """One stream's place between two frames."""

    memory: Tensor  # [memory size], dtype and device of the decoder; of the same size for every stream
    frames: int = 0  # that the memory has seen


@dataclass(frozen=True)
class Piece:
    """What one stream brings to a call."""

    codes: Tensor  # int32 or int64 [n, Q], n >= 0, each in [0, codebook_size)
    state: WaveformState


class WaveformDecoder:
    """Weights of the network, ready for any number of streams."""

    def __init__(
        self,
        config: WaveformConfig,
        weights: Weights,
        *,
        prefix: str = "code2wav.",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Load the weights under `prefix`; ConfigError where they do not have the shape that config says."""
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        source = Source(weights, prefix, self.device, dtype)
        layout = Layout()
        hidden = config.hidden_size
        with torch.inference_mode():
            self.reader = Reader(config, source, layout)
            # Elements of a stream's memory that the reader has, the first ones.
            self.window_size = layout.size
            self.wideners = [
                Widener(ratio, hidden, source.under(f"upsample.{i}."), layout)
                for i, ratio in enumerate(config.upsampling_ratios)
            ]
            channels = config.decoder_dim
            self.enter = Convolution(source.under("decoder.0."), layout, hidden, channels, kernel=_KERNEL)
            self.blocks = []
            for i, rate in enumerate(config.upsample_rates, start=1):
                self.blocks.append(Block(rate, channels, source.under(f"decoder.{i}.block."), layout))
                channels //= 2
            last = len(self.blocks) + 1
            self.snake = Snake(source.under(f"decoder.{last}."), channels)
            self.leave = Convolution(
                source.under(f"decoder.{last + 1}."), layout, channels, 1, kernel=_KERNEL
            )
        self.memory_size = layout.size  # elements of one stream's memory

    @property
    def num_codebooks(self) -> int:
        return self.config.num_quantizers

    @property
    def codebook_size(self) -> int:
        return self.config.codebook_size

    @property
    def samples_per_frame(self) -> int:
        return self.config.samples_per_frame

    @property
    def missing_samples(self) -> int:
        """See WaveformConfig."""
        return self.config.missing_samples

    @property
    def state_bytes(self) -> int:
        """Memory of one stream, from its first frame to its last."""
        return self.memory_size * self.dtype.itemsize

    def new_state(self) -> WaveformState:
        return WaveformState(torch.zeros(self.memory_size, device=self.device, dtype=self.dtype))

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Advance each piece's state by its frames; its new samples [m] in [-1, 1], in the decoder's dtype.

        A stream may have one piece. After n frames, its samples so far are n · samples_per_frame -
        missing_samples, or none while that is negative.
        """
        samples: list[list[Tensor]] = [[] for _ in pieces]
        for begin in range(0, max((len(piece.codes) for piece in pieces), default=0), MAX_PASS_FRAMES):
            parts = [piece.codes[begin : begin + MAX_PASS_FRAMES] for piece in pieces]
            for group in _equally_long(parts):
                codes = torch.stack([parts[i] for i in group])
                new = self._advance(codes, [pieces[i].state for i in group])
                for i, row in zip(group, new, strict=True):
                    samples[i].append(row)
        nothing = torch.zeros(0, device=self.device, dtype=self.dtype)
        return [torch.cat(parts) if len(parts) > 1 else (parts or [nothing])[0] for parts in samples]

    def _advance(self, codes: Tensor, states: Sequence[WaveformState]) -> list[Tensor]:
        """One pass over as many frames [B, n, Q] of each stream; the new samples of each."""
        memories = [state.memory for state in states]
        memory = memories[0][None] if len(memories) == 1 else torch.stack(memories)
        ages = [state.frames for state in states]
        wave = self._decode(codes.to(self.device), memory, ages)
        if len(memories) > 1:
            torch._foreach_copy_(memories, memory.unbind())
        for state in states:
            state.frames += codes.shape[1]
        lead, rate = self.config.missing_samples, self.samples_per_frame
        return [row[max(0, lead - age * rate) :] for row, age in zip(wave, ages, strict=True)]

    def _decode(self, codes: Tensor, memory: Tensor, ages: Sequence[int]) -> Tensor:
        """codes [B, n, Q] to samples [B, n · samples_per_frame], leads included; moves memory [B, size]."""
        return self._run(codes, EvenPass(memory, ages))

    def step(
        self, memory: Tensor, frames: Tensor, codes: Tensor, valid: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One pass of B streams in fixed shapes: waits for nothing, changes no argument.

        memory: [B, memory_size]; frames: int32 [B], that it has seen, up to `age_limit`
        codes: int32 [B, n, Q], 0 < n <= MAX_PASS_FRAMES; valid: int32 [B], how many of them are the stream's
        start: bool [B], the stream begins here, whatever its memory and frames are

        Gives samples [B, n · samples_per_frame], leads included, that mean nothing behind the valid frames,
        and memory and frames after these.
        """
        frames = frames.masked_fill(start, 0)
        passed = PaddedPass(memory.masked_fill(start[:, None], 0), frames, valid)
        wave = self._run(codes, passed)
        return wave, passed.moved(), (frames + valid).clamp(max=self.config.age_limit)

    def _run(self, codes: Tensor, passed: Pass) -> Tensor:
        """codes [B, n, Q] to samples [B, n · samples_per_frame], leads included."""
        length = codes.shape[1]
        x = self.reader(codes, passed)
        for widener in self.wideners:
            x = widener(x, passed)
        x = self.enter(x.mT, passed)
        columns = math.prod(self.config.upsampling_ratios)  # a frame
        for block, lead in zip(self.blocks, self.config.leads, strict=True):
            columns *= block.rate
            x = block(x, passed, passed.lead(lead, columns, length * columns))
        return _within_full_scale(self.leave(x, passed, self.snake).squeeze(1))


class Widener:
    """Each row to `ratio` rows, then a ConvNeXt block; rows [B, n, H] to rows [B, n · ratio, H].

    A transposed convolution whose kernel is its stride maps each row by itself: it is a linear layer.
    """

    def __init__(self, ratio: int, hidden: int, source: Source, layout: Layout) -> None:
        self._hidden = hidden
        weight = source("0.conv.weight", hidden, hidden, ratio).permute(2, 1, 0).flatten(0, 1)
        bias = source("0.conv.bias", hidden).repeat(ratio)
        self.widen = Linear(weight.contiguous(), bias)
        layout.widen(ratio)
        block = source.under("1.")
        self.depthwise = Convolution(
            block.under("dwconv."), layout, hidden, hidden, kernel=_KERNEL, groups=hidden
        )
        self.norm = (block("norm.weight", hidden), block("norm.bias", hidden))
        self.expand = block.linear("pwconv1", 4 * hidden, hidden, bias=True)
        self.shrink = block.linear("pwconv2", hidden, 4 * hidden, bias=True, gain=block.wide("gamma", hidden))

    def __call__(self, x: Tensor, memory: Memory) -> Tensor:
        x = self.widen(x).view(x.shape[0], -1, self._hidden)
        y = self.depthwise(x.mT, memory).mT
        y = F.layer_norm(y, (self._hidden,), *self.norm, NORM_EPSILON)
        return self.shrink(F.gelu(self.expand(y))).add_(x)


class Block:
    """snake, transposed convolution, residual units; [B, C, T] to [B, C / 2, T · rate]."""

    def __init__(self, rate: int, channels: int, source: Source, layout: Layout) -> None:
        self.rate = rate
        self.snake = Snake(source.under("0."), channels)
        self.upsample = Upsampling(rate, channels, channels // 2, source.under("1.conv."), layout)
        layout.widen(rate)
        self.units = [
            ResidualUnit(channels // 2, dilation, source.under(f"{i}."), layout)
            for i, dilation in enumerate(_DILATIONS, start=2)
        ]

    def __call__(self, x: Tensor, memory: Memory, lead: Tensor | None) -> Tensor:
        """lead: bool [B, 1, up to T · rate], the columns to keep at zero; None: there are none."""
        x = _silenced(self.upsample(x, memory, self.snake), lead)
        for unit in self.units:
            x = _silenced(unit(x, memory), lead)
        return x


class ResidualUnit:
    def __init__(self, channels: int, dilation: int, source: Source, layout: Layout) -> None:
        self.snakes = [Snake(source.under(f"act{i}."), channels) for i in (1, 2)]
        self.spread = Convolution(
            source.under("conv1."), layout, channels, channels, kernel=_KERNEL, dilation=dilation
        )
        self.mix = Convolution(source.under("conv2."), layout, channels, channels, kernel=1)

    def __call__(self, x: Tensor, memory: Memory) -> Tensor:
        y = self.spread(x, memory, self.snakes[0])
        return self.mix(y, memory, self.snakes[1]).add_(x)


def _within_full_scale(x: Tensor) -> Tensor:
    """x, in place, in [-1, 1]; what is not a number stays none, also where a runtime's clip would hide it."""
    if torch.compiler.is_exporting():
        return torch.where(x > 1, 1.0, torch.where(x < -1, -1.0, x))
    return x.clamp_(-1, 1)


def _silenced(x: Tensor, lead: Tensor | None) -> Tensor:
    """x [B, C, T] with zeros, in place, where `lead` [B, 1, up to T] says so."""
    if lead is None:
        return x
    if torch.compiler.is_exporting():
        begin = lead.shape[-1]
        return torch.cat((x[..., :begin].masked_fill(lead, 0), x[..., begin:]), dim=-1)
    x[..., : lead.shape[-1]].masked_fill_(lead, 0)
    return x


def _equally_long(parts: Sequence[Tensor]) -> list[list[int]]:
    """Which parts [n, Q] can share a pass: groups of indices, without those of empty parts."""
    groups: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        groups.setdefault(len(part), []).append(index)
    groups.pop(0, None)
    return [
        group[first : first + MAX_BATCH_FRAMES // length]
        for length, group in groups.items()
        for first in range(0, len(group), MAX_BATCH_FRAMES // length)
    ]
