"""How much a streaming codec decoder (waveform_decoder.py) holds, from its config and without torch.

    code2wav_config ─► WaveformSize ─► elements: as stored in files, as held, of a stream's state, of a pass

In shapes: H hidden size, C channels, W sliding window in frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tritone.errors import ConfigError
from tritone.networks.waveform_config import MAX_BATCH_FRAMES, MAX_PASS_FRAMES

_KERNEL = 7
_DILATIONS = (1, 3, 9)


@dataclass(frozen=True)
class WaveformSize:
    """The numbers of a decoder that its memory depends on."""

    codebook: int
    codebooks: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    is_biased: bool
    ratios: tuple[int, ...]
    rates: tuple[int, ...]
    channels: int  # before the first rate; each halves them

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> WaveformSize:
        """Read the codec's part of config.json."""
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                codebook=int(config["codebook_size"]),
                codebooks=int(config["num_quantizers"]),
                hidden=hidden,
                inner=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config["num_key_value_heads"]),
                head_dim=int(config.get("head_dim") or hidden // heads),
                window=int(config["sliding_window"]),
                is_biased=bool(config.get("attention_bias", False)),
                ratios=tuple(map(int, config["upsampling_ratios"])),
                rates=tuple(map(int, config["upsample_rates"])),
                channels=int(config["decoder_dim"]),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise ConfigError(
                f"the codec's config.json has no usable {fault}", "use the one that came with the weights"
            ) from None

    @property
    def samples_per_frame(self) -> int:
        return math.prod((*self.ratios, *self.rates))

    @property
    def last_channels(self) -> int:
        return int(self.channels >> len(self.rates))

    @property
    def stored(self) -> int:
        """Elements of all weights in the files."""
        scales = 2 * self.layers * self.hidden + len(self.ratios) * self.hidden
        return self.held + scales - self._repeated

    @property
    def held(self) -> int:
        """The same in memory: scales are multiplied in, and biases of what widens stand there often."""
        h = self.hidden
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = (qkv + self.heads * self.head_dim) * h + (qkv + h if self.is_biased else 0)
        transformer = self.layers * (attention + 3 * h * self.inner + 2 * h) + h
        wideners = len(self.ratios) * (2 * h + _KERNEL * h + h + 2 * h + 8 * h * h + 4 * h) + sum(
            h * h * ratio for ratio in self.ratios
        )
        enter = self.channels * (h * _KERNEL + 1)
        leave = 2 * self.last_channels + self.last_channels * _KERNEL + 1
        blocks = sum(
            2 * 2 * out + 2 * out * out * 2 * rate + out + 3 * (4 * out + out * out * (_KERNEL + 1) + 2 * out)
            for rate, out in self._blocks()
        )
        table = self.codebooks * self.codebook * h
        return table + transformer + wideners + enter + blocks + leave + self._repeated

    @property
    def tables_bytes(self) -> int:
        """Of int32 offsets and a bool mask."""
        return 4 * self.codebooks + MAX_PASS_FRAMES * self._keys

    @property
    def turns(self) -> int:
        """Elements of the tables that turn queries and keys."""
        return 2 * self._keys * self.head_dim

    @property
    def state(self) -> int:
        """Elements of a stream's memory: keys and values of the window, and the tails of convolutions."""
        past, tail = self.window - 1, _KERNEL - 1
        keys = self.layers * 2 * self.kv_heads * past * self.head_dim
        tails = len(self.ratios) * self.hidden * tail + self.hidden * tail + self.last_channels * tail
        return keys + tails + sum(2 * out + out * tail * sum(_DILATIONS) for _, out in self._blocks())

    @property
    def pass_elements(self) -> int:
        """At most, of the largest pass: four tensors of the last, longest layer, and the streams' states."""
        wave = 4 * MAX_BATCH_FRAMES * self.samples_per_frame * self.last_channels
        return wave + MAX_BATCH_FRAMES // 4 * self.state

    def between(self, streams: int, frames: int) -> int:
        """Elements of the largest tensor between two convolutions of kernels/waveform.py; frames: of all."""
        columns = math.prod(self.ratios)
        sizes, tail = [(streams + frames * columns) * self.channels], (_KERNEL - 1) * max(_DILATIONS)
        for rate, out in self._blocks():
            columns *= rate
            sizes.append((streams * tail + frames * columns) * out)
        return max(sizes)

    @property
    def flops(self) -> int:
        """Multiplications and additions of a frame."""
        h, columns = self.hidden, 1
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        macs = self.layers * ((qkv + self.heads * self.head_dim) * h + 3 * h * self.inner)
        macs += self.layers * 2 * self.heads * self.head_dim * self.window
        for ratio in self.ratios:
            macs += columns * h * h * ratio
            columns *= ratio
            macs += columns * (8 * h * h + _KERNEL * h)
        macs += columns * self.channels * h * _KERNEL
        for rate, out in self._blocks():
            macs += columns * 2 * out * out * 2 * rate
            columns *= rate
            macs += columns * 3 * out * out * (_KERNEL + 1)
        return 2 * (macs + columns * self.last_channels * _KERNEL)

    @property
    def _keys(self) -> int:
        return self.window - 1 + MAX_PASS_FRAMES

    @property
    def _repeated(self) -> int:
        """Elements of biases that are laid out more than once, without the first time."""
        wide = sum((ratio - 1) * self.hidden for ratio in self.ratios)
        return wide + sum((rate - 1) * out for rate, out in self._blocks())

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Rate and channels behind each."""
        for number, rate in enumerate(self.rates, start=1):
            yield rate, self.channels >> number
