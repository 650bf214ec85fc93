"""Layers that look back a fixed span and no further, for many streams at once, and their memory.

    a stream's memory [size]  =  │ layer 0's place │ layer 1's place │ … │
    x [B, C, T] ─► place's columns, then x ─► layer ─► y [B, C', T']
                     ▲                 └─ the last of them, for the next call
                     └─ Memory: [B, size], a row a stream

All layers of a network share one tensor a stream, so that taking up a batch of streams is one stack, and
laying them down one copy, whatever the number of layers. `Memory` is moved in place by streams that bring as
many columns; `PaddedMemory` makes a new one, of streams whose last frames may be padding.

Snake: Ziyin et al. 2020 (arXiv 2006.08195), in the form of BigVGAN (arXiv 2206.04658).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.errors import ConfigError
from tritone.networks.linear import Linear
from tritone.networks.weights import Weights

_SNAKE_EPSILON = 1e-9


class Source:
    """The weights under a prefix, checked for their shape."""

    def __init__(self, weights: Weights, prefix: str, device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._prefix = weights, prefix
        self.device, self.dtype = device, dtype

    def under(self, prefix: str) -> Source:
        return Source(self._weights, self._prefix + prefix, self.device, self.dtype)

    def __call__(self, name: str, *shape: int) -> Tensor:
        """In the network's dtype; ConfigError when the weight has another shape."""
        return self.wide(name, *shape).to(self.dtype)

    def wide(self, name: str, *shape: int) -> Tensor:
        """The same in float32 or wider, for what is calculated from weights once."""
        name = self._prefix + name
        tensor = self._weights[name]
        if tensor.shape != shape:
            raise ConfigError(
                f"weight '{name}' has the shape {list(tensor.shape)}, config.json gives it {list(shape)}",
                "use the config.json that came with the weights",
            )
        return tensor.to(self.device, torch.promote_types(self.dtype, torch.float32))

    def linear(
        self, name: str, outputs: int, inputs: int, *, bias: bool, gain: Tensor | None = None
    ) -> Linear:
        """The layer `name`, each of its outputs times its `gain` [outputs]."""
        parts = [self.wide(f"{name}.weight", outputs, inputs)]
        if bias:
            parts.append(self.wide(f"{name}.bias", outputs)[:, None])
        if gain is not None:
            parts = [part * gain[:, None] for part in parts]
        weight, *rest = (part.to(self.dtype) for part in parts)
        return Linear(weight, rest[0].flatten() if rest else None)


class Layout:
    """Gives each layer its part of a stream's memory."""

    def __init__(self) -> None:
        self.size = 0
        self._columns = 1

    def widen(self, ratio: int) -> None:
        """Layers that reserve from now on see `ratio` times as many columns a frame."""
        self._columns *= ratio

    def reserve(self, *shape: int) -> Place:
        place = Place(self.size, shape, self._columns)
        self.size += math.prod(shape)
        return place


@dataclass(frozen=True)
class Place:
    start: int
    shape: tuple[int, ...]
    columns: int  # that a layer is given for a frame

    def of(self, memory: Tensor) -> Tensor:
        """View [B, *shape] of memory [B, size]."""
        return memory[:, self.start : self.start + math.prod(self.shape)].view(memory.shape[0], *self.shape)


class Memory:
    """What B streams remember, moved in place; each brings as many columns to a call as the others."""

    def __init__(self, rows: Tensor) -> None:
        """rows: [B, size of the layout]"""
        self._rows = rows

    def of(self, place: Place) -> Tensor:
        """[B, *place.shape]"""
        return place.of(self._rows)

    def keep(self, place: Place, joined: Tensor, dim: int = -1) -> None:
        """The last columns of `joined`, what a layer kept and its new columns along `dim` < 0, are kept."""
        kept = self.of(place)
        size = kept.shape[dim]
        kept.copy_(joined.narrow(dim, joined.shape[dim] - size, size))


class PaddedMemory(Memory):
    """What B streams remember, made anew; of the frames of a call each brings the first `valid`."""

    def __init__(self, rows: Tensor, valid: Tensor) -> None:
        """valid: int [B], frames; what lies behind them is as if it was not there."""
        super().__init__(rows)
        self._valid = valid.long()
        self._kept: dict[int, Tensor] = {}  # by start of the place: [B, size]

    def keep(self, place: Place, joined: Tensor, dim: int = -1) -> None:
        size = place.shape[dim]
        if not size:
            return
        columns = self._valid[:, None] * place.columns + torch.arange(size, device=joined.device)
        shape = [1] * joined.dim()
        shape[0], shape[dim] = columns.shape
        index = columns.view(shape).expand(-1, *place.shape)
        self._kept[place.start] = joined.gather(dim, index).flatten(1)

    def moved(self) -> Tensor:
        """[B, size of the layout]; every layer has kept its columns."""
        return torch.cat([self._kept[start] for start in sorted(self._kept)], dim=1)


class Snake:
    """`x + sin²(α x) / β` with α and β of each channel, stored as logarithms."""

    def __init__(self, source: Source, channels: int) -> None:
        alpha, beta = (source.wide(name, channels).exp()[:, None] for name in ("alpha", "beta"))
        self.alpha, self.gain = alpha.to(source.dtype), (1.0 / (beta + _SNAKE_EPSILON)).to(source.dtype)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[B, C, T] into `out` of the same shape, or a new tensor."""
        return torch.addcmul(x, (x * self.alpha).sin_().square_(), self.gain, out=out)


class _Causal:
    """A convolution over what lies behind each column; its last inputs are kept for the next call."""

    def __init__(self, tail: int, channels: int, layout: Layout) -> None:
        self.tail = layout.reserve(channels, tail)

    def _behind_tail(self, x: Tensor, memory: Memory, snake: Snake | None) -> Tensor:
        """The tail in memory, then x [B, C, T], through `snake` if there is one: [B, C, tail + T]."""
        tail = memory.of(self.tail)
        if torch.compiler.is_exporting():  # a graph without writes into parts of a tensor
            y = x if snake is None else snake(x)
            joined = torch.cat((tail, y), dim=-1) if tail.shape[-1] else y
        else:
            kept, length = tail.shape[-1], x.shape[-1]
            joined = torch.empty((*x.shape[:-1], kept + length), device=x.device, dtype=x.dtype)
            joined[..., :kept] = tail
            if snake is None:
                joined[..., kept:] = x
            else:
                snake(x, out=joined[..., kept:])
        memory.keep(self.tail, joined)
        return joined


class Convolution(_Causal):
    """[B, inputs, T] to [B, outputs, T]."""

    def __init__(
        self,
        source: Source,
        layout: Layout,
        inputs: int,
        outputs: int,
        *,
        kernel: int,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__((kernel - 1) * dilation, inputs, layout)
        self.weight = source("conv.weight", outputs, inputs // groups, kernel)
        self.bias = source("conv.bias", outputs)
        self.dilation, self._groups = dilation, groups

    def __call__(self, x: Tensor, memory: Memory, snake: Snake | None = None) -> Tensor:
        x = self._behind_tail(x, memory, snake)
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation, groups=self._groups)


class Upsampling(_Causal):
    """A transposed convolution of kernel 2r and stride r; [B, inputs, T] to [B, outputs, T · r].

    Done as a convolution of kernel 2 with r · outputs channels, whose r columns are then laid one after the
    other: no column is computed that is cut off, and the tail is that of any causal convolution.
    """

    def __init__(self, rate: int, inputs: int, outputs: int, source: Source, layout: Layout) -> None:
        super().__init__(1, inputs, layout)
        weight = source("weight", inputs, outputs, 2 * rate).view(inputs, outputs, 2, rate).flip(2)
        self.weight = weight.permute(1, 3, 0, 2).flatten(0, 1).contiguous()  # [outputs · r, inputs, 2]
        self.bias = source("bias", outputs).repeat_interleave(rate)
        self.rate = rate

    def __call__(self, x: Tensor, memory: Memory, snake: Snake) -> Tensor:
        y = F.conv1d(self._behind_tail(x, memory, snake), self.weight, self.bias)
        return y.view(y.shape[0], -1, self.rate, x.shape[-1]).mT.flatten(2)
