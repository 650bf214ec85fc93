"""A pass of a streaming codec decoder (networks/waveform_decoder.py) whose convolutions are kernels.

    codes [B, n, Q] ─► Reader, in torch ─► rows [B, n, H] ─► wideners ─► convolution k7 ─► blocks ─► wave

A tensor of channels is [B, T, C] here. Every snake is computed by the kernel whose output it takes, so that a
residual unit is two kernels, and a small one that sees to the tails. Streams stay in their
slots: what the reader keeps is copied out and back, tails are read and written where they lie.

The memory of a stream has the size that the decoder says, but a tail lies in it as [tail, C].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.kernels.convolution import (
    Snake,
    Streams,
    Taps,
    carry,
    convolve,
    convolve_to_one,
    depthwise_norm,
)
from tritone.networks import causal_layers
from tritone.networks.causal_layers import Convolution, Upsampling
from tritone.networks.linear import Linear
from tritone.networks.waveform_decoder import NORM_EPSILON, WaveformDecoder, Widener
from tritone.networks.waveform_pass import PaddedPass


class _Layer(NamedTuple):
    """A convolution that looks back."""

    taps: Taps
    place: int  # of its tail in a stream's memory
    columns: int  # that come to it with a frame


class _Wide(NamedTuple):
    widen: Linear
    depthwise: _Layer
    norm: tuple[Tensor, Tensor]
    expand: Linear
    shrink: Linear


class _Next(NamedTuple):
    """What the next convolution wants of an output."""

    snake: Snake
    tail: int  # columns that it looks back


class _Unit(NamedTuple):
    spread: _Layer
    between: Snake
    mix: Taps
    then: _Next


class _Block(NamedTuple):
    upsample: _Layer
    then: _Next
    units: list[_Unit]
    lead: int  # columns behind it that come before a stream's first sample


class Rooms:
    """For what lies between convolutions, of any pass: two that take turns, and one for what is kept."""

    def __init__(self, elements: int, like: Tensor) -> None:
        self._rooms = torch.zeros((3, elements), dtype=like.dtype, device=like.device)
        self._kept: Tensor = self._rooms[0]
        self._turns: list[Tensor] = [self._rooms[1], self._rooms[2]]

    def kept(self, *shape: int) -> Tensor:
        return self._kept[: math.prod(shape)].view(shape)

    def next(self, *shape: int) -> Tensor:
        """Not the one before, which is being read."""
        self._turns.reverse()
        return self._turns[0][: math.prod(shape)].view(shape)


class WaveformKernels:
    """Holds what it needs of a decoder, whose own weights of convolutions may then go."""

    def __init__(self, decoder: WaveformDecoder, shapes: Iterable[tuple[int, int]]) -> None:
        """shapes: (streams, frames) of the passes that there will be."""
        self._reader, self._window = decoder.reader, decoder.window_size
        self._wideners = [_widener(widener) for widener in decoder.wideners]
        self._enter, self._leave = _layer(decoder.enter), _layer(decoder.leave)
        following = iter(_chain(decoder))
        self._first = next(following)
        self._blocks = []
        for block, lead in zip(decoder.blocks, decoder.config.leads, strict=True):
            upsample, then = _upsampling(block.upsample), next(following)
            units = [
                _Unit(_layer(unit.spread), _snake(unit.snakes[1]), _taps(unit.mix), next(following))
                for unit in block.units
            ]
            self._blocks.append(_Block(upsample, then, units, lead))
        elements = max(self._largest(*shape) for shape in shapes)
        self._rooms = Rooms(elements, self._enter.taps.bias)

    def _largest(self, batch: int, frames: int) -> int:
        """Elements of the largest tensor between convolutions."""
        sizes = [batch * (self._first.tail + frames * self._enter.columns) * len(self._enter.taps.bias)]
        for block in self._blocks:
            taps, tails = block.upsample.taps, [block.then.tail, *(unit.then.tail for unit in block.units)]
            columns = frames * block.upsample.columns * taps.rate
            sizes.append(batch * (max(tails) + columns) * len(taps.bias))
        return max(sizes)

    def __call__(self, codes: Tensor, memory: Tensor, streams: Streams, wave: Tensor) -> None:
        """Samples of codes int32 [B, n, Q] into `wave` [B, n · samples_per_frame], leads included.

        memory: [slots, size], contiguous, zeros in the beginning; it moves. What lies in `wave` behind the
        valid frames of a stream stays as it was.
        """
        x = self._rows(codes, memory, streams)
        for widener in self._wideners:
            x = self._widened(widener, x, memory, streams)
        x = self._before(self._enter, x, memory, streams)
        x = self._convolved(self._enter, x, streams, self._first)
        for block in self._blocks:
            x = self._block(block, x, memory, streams)
        self._carried(self._leave, x, memory, streams)
        convolve_to_one(x, self._leave.taps, self._leave.columns, streams, wave)

    def _rows(self, codes: Tensor, memory: Tensor, streams: Streams) -> Tensor:
        slots, windows = streams.slots.long(), memory[:, : self._window]
        known = windows[slots].masked_fill_(streams.starts.bool()[:, None], 0)
        passed = PaddedPass(known, streams.ages, streams.valid)
        rows = self._reader(codes, passed)
        windows[slots] = passed.moved()
        return rows

    def _widened(self, widener: _Wide, x: Tensor, memory: Tensor, streams: Streams) -> Tensor:
        """[B, T, H] to [B, T · ratio, H]"""
        wide = widener.widen(x).view(x.shape[0], -1, x.shape[2])
        rows = self._before(widener.depthwise, wide, memory, streams)
        normed = depthwise_norm(rows, widener.depthwise.taps, widener.norm, NORM_EPSILON)
        return widener.shrink(F.gelu(widener.expand(normed))).add_(wide)

    def _block(self, block: _Block, x: Tensor, memory: Tensor, streams: Streams) -> Tensor:
        """x behind the tail of the upsampling, to the same for the convolution after the block."""
        taps = block.upsample.taps
        columns = block.upsample.columns * taps.rate
        shape = (x.shape[0], (x.shape[1] - taps.tail) * taps.rate, len(taps.bias))
        kept = self._rooms.kept(*shape)
        self._carried(block.upsample, x, memory, streams)
        x = self._convolved(block.upsample, x, streams, block.then, kept=kept, keep=True, lead=block.lead)
        for number, unit in enumerate(block.units, start=1):
            self._carried(unit.spread, x, memory, streams)
            spread = self._rooms.next(*shape)
            convolve(x, unit.spread.taps, columns, streams, spread, snake=unit.between)
            mix, keep = _Layer(unit.mix, 0, columns), number < len(block.units)
            x = self._convolved(
                mix, spread, streams, unit.then, kept=kept, add=True, keep=keep, lead=block.lead
            )
        return x

    def _convolved(self, layer: _Layer, x: Tensor, streams: Streams, then: _Next, **more: Any) -> Tensor:
        """As the next convolution wants it."""
        taps = layer.taps
        columns = (x.shape[1] - taps.tail) * taps.rate
        y = self._rooms.next(x.shape[0], then.tail + columns, len(taps.bias))
        convolve(x, taps, layer.columns, streams, y, snake=then.snake, **more)
        return y

    def _before(self, layer: _Layer, x: Tensor, memory: Tensor, streams: Streams) -> Tensor:
        """x [B, T, C] behind its tail."""
        tail = layer.taps.tail
        y = x.new_empty((x.shape[0], tail + x.shape[1], x.shape[2]))
        y[:, tail:] = x
        self._carried(layer, y, memory, streams)
        return y

    def _carried(self, layer: _Layer, x: Tensor, memory: Tensor, streams: Streams) -> None:
        carry(x, layer.taps.tail, layer.columns, memory, layer.place, streams)


def _chain(decoder: WaveformDecoder) -> Iterator[_Next]:
    """Every convolution before which an output waits, in order."""
    for block in decoder.blocks:
        yield _Next(_snake(block.snake), block.upsample.tail.shape[-1])
        for unit in block.units:
            yield _Next(_snake(unit.snakes[0]), unit.spread.tail.shape[-1])
    yield _Next(_snake(decoder.snake), decoder.leave.tail.shape[-1])


def _widener(widener: Widener) -> _Wide:
    return _Wide(widener.widen, _layer(widener.depthwise), widener.norm, widener.expand, widener.shrink)


def _layer(convolution: Convolution) -> _Layer:
    return _Layer(_taps(convolution), convolution.tail.start, convolution.tail.columns)


def _taps(convolution: Convolution) -> Taps:
    weight = convolution.weight.permute(2, 0, 1).contiguous()
    return Taps(weight, convolution.bias, convolution.dilation)


def _upsampling(upsampling: Upsampling) -> _Layer:
    rate, weight = upsampling.rate, upsampling.weight
    outputs, inputs = len(weight) // rate, weight.shape[1]
    # [outputs · r, inputs, 2] to [2, r · outputs, inputs]
    taps = weight.view(outputs, rate, inputs, 2).permute(3, 1, 0, 2).reshape(2, rate * outputs, inputs)
    bias = upsampling.bias.view(outputs, rate)[:, 0].contiguous()
    return _Layer(Taps(taps, bias, rate=rate), upsampling.tail.start, upsampling.tail.columns)


def _snake(snake: causal_layers.Snake) -> Snake:
    return Snake(snake.alpha.flatten(), snake.gain.flatten())
