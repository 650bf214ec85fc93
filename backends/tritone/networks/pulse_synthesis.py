"""Spectra and pitch in, samples out, as a stream that equals the synthesis of the whole segment.

    f0 [F] ─► pulse train ─► short-time spectra ─► × harmonic filter ─┐
                                  noise spectra ─► × noise magnitude ─┼─► + ─► inverse, overlap-add ─► samples
                                                       free spectra ──┘                              [F * hop]

    S = e^lh · e^(iπ tanh θ) · STFT(pulses) + e^ln · Z + e^lr · e^(iφ)        Z: complex Gaussian

Frame k of a segment is centred on sample k * hop, so its window of 4 hops reaches 2 hops back and 2 ahead:

    pulse blocks (one hop each)     │ k-2 │ k-1 │  k  │ k+1 │
    overlap-add blocks              │  k  │ k+1 │ k+2 │ k+3 │     samples of frame j are block j+2

Before and after a segment the pulse train is mirrored, and its outermost samples, where fewer windows
overlap, are scaled by what does overlap. The noise of a frame depends on (seed, number of the frame in the
answer) and on nothing else, so that neither chunks nor neighbours change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

_NEAR_PULSE = 2e-3  # |2 sin(phase / 2)| below which the harmonic sum is replaced by its limit
_LEAST_OVERLAP = 1e-11  # keeps a sample that no window covers from becoming inf
_WORDS_PER_COUNT = 4  # 64-bit words that one count of a Philox generator yields


@dataclass(frozen=True)
class SignalConfig:
    sample_rate_hz: int
    hop_samples: int
    bins: int
    voiced_above_hz: float  # f0 at or below this is silence in the pulse train
    harmonics_below_hz: float
    log_magnitude_ceiling: float  # of lh, ln and lr

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """From a checkpoint's config.json, which may say more."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})

    @property
    def window_samples(self) -> int:
        return 2 * (self.bins - 1)

    @property
    def window_hops(self) -> int:
        return self.window_samples // self.hop_samples

    @property
    def frame_rate_hz(self) -> float:
        return self.sample_rate_hz / self.hop_samples

    @property
    def lookahead_frames(self) -> int:
        """How far f0 must be ahead of the spectra: the first window is mirrored from the blocks behind it."""
        return self.window_hops // 2 + 1


@dataclass
class _Segment:
    """One stream's place in its segment."""

    f0: Tensor  # float32 [0 or 2] Hz: the last frame with pulses and the one that waits for its follower
    cycles: Tensor  # float64 [1]: f0 summed over all samples so far, Hz
    pulses: Tensor  # float32 [n, hop]: blocks that a window still needs
    overlap: Tensor  # float32 [window_hops - 1, hop]: the part of the last windows that more will be added to
    frames_done: int = 0  # frames whose spectra have been used
    mirrored: bool = False  # the blocks before the segment are in `pulses`


@dataclass
class SynthesisState:
    """One stream's place in its answer."""

    seed: int  # of the noise
    segment: _Segment
    frames_done: int = 0  # in the answer, over all its segments


@dataclass(frozen=True)
class Pitch:
    """What one stream brings to a call besides its spectra."""

    f0: Tensor  # float32 [F] Hz, F >= 0
    state: SynthesisState
    segment_end: bool


class PulseSynthesis:
    """Has no weights, only tables; immutable, so any number of streams may share it."""

    def __init__(self, config: SignalConfig, device: str | torch.device = "cpu") -> None:
        if config.window_samples % (2 * config.hop_samples):
            raise ValueError(f"a window of {config.window_samples} samples is not an even number of hops")
        self.config = config
        turn = 2 * np.pi * np.arange(config.window_samples) / config.window_samples
        window = torch.from_numpy(0.5 - 0.5 * np.cos(turn)).float().to(device)
        self._window = window
        # A unit cosine then peaks at 1 in the spectrum, so that e^lh is the magnitude of a harmonic.
        self._analysis = window / (config.window_samples / 4)
        self._power = (window * window).view(config.window_hops, config.hop_samples)
        # Weights of the two frames around each sample of a hop; frame centres lie in the middle of hops.
        later = ((np.arange(config.hop_samples) + 0.5) / config.hop_samples - 0.5) % 1
        self._later = torch.from_numpy(later).float().to(device)
        self._earlier = 1 - self._later

    def new_state(self, seed: int) -> SynthesisState:
        return SynthesisState(seed, self._new_segment())

    def __call__(self, pitches: Sequence[Pitch], spectra: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Advance each stream by its f0 and its share of the spectra.

        spectra: [sum of counts, 5, bins]: lh, theta, ln, lr, phi of the streams end to end, each stream's
        behind its f0 by `lookahead_frames` or more, or complete when its segment ends.
        Returns float32 [n] samples for each stream.
        """
        self._extend_pulses(pitches)
        windows = [
            self._take_windows(pitch.state.segment, count)
            for pitch, count in zip(pitches, counts, strict=True)
        ]
        noise = [self._noise(pitch.state, count) for pitch, count in zip(pitches, counts, strict=True)]
        frames = self._synthesise(torch.cat(windows), spectra, torch.cat(noise))
        return [
            self._overlap_add(mine, pitch)
            for mine, pitch in zip(torch.split(frames, list(counts)), pitches, strict=True)
        ]

    def _new_segment(self) -> _Segment:
        zeros = self._window.new_zeros
        return _Segment(
            f0=zeros(0),
            cycles=zeros(1, dtype=torch.float64),
            pulses=zeros(0, self.config.hop_samples),
            overlap=zeros(self.config.window_hops - 1, self.config.hop_samples),
        )

    def _extend_pulses(self, pitches: Sequence[Pitch]) -> None:
        """Add the blocks that the new f0 allows: frames with a follower, and at the end the last one."""
        triples = [self._f0_triples(pitch) for pitch in pitches]
        segments = [pitch.state.segment for pitch in pitches]
        blocks = self._pulse_blocks(torch.cat(triples), segments, list(map(len, triples)))
        hop, before = self.config.hop_samples, self.config.window_samples // 2
        for pitch, segment, mine in zip(pitches, segments, blocks, strict=True):
            train = torch.cat([segment.pulses, mine])
            if len(train):
                starts = not segment.mirrored and (pitch.segment_end or train.numel() > before)
                segment.mirrored |= starts
                train = _mirror(train, before if starts else 0, before - hop if pitch.segment_end else 0)
            segment.pulses = train

    def _f0_triples(self, pitch: Pitch) -> Tensor:
        """f0 before, in and after each frame that can be pulsed now, [n, 3]; the edges repeat."""
        segment, new = pitch.state.segment, pitch.f0
        known = torch.cat([segment.f0 if len(segment.f0) else new[:1], new])
        segment.f0 = known[-2:].clone()
        if pitch.segment_end:
            known = torch.cat([known, known[-1:]])
        return known.unfold(0, 3, 1) if len(known) >= 3 else known.new_zeros(0, 3)

    def _pulse_blocks(self, triples: Tensor, segments: Sequence[_Segment], counts: list[int]) -> list[Tensor]:
        """Every harmonic below the limit at unit amplitude:

        Σ_(h ≤ H) cos(h t) = sin((H + ½) t) / (2 sin(t / 2)) - ½
        """
        hop, config = self.config.hop_samples, self.config
        before, here, after = (column[:, None] for column in triples.unbind(1))
        half = hop // 2
        f0 = torch.cat(
            [
                before * self._earlier[:half] + here * self._later[:half],
                here * self._earlier[half:] + after * self._later[half:],
            ],
            dim=1,
        )
        voiced = f0 > config.voiced_above_hz
        f0 = f0.clamp_min(config.voiced_above_hz)
        cycles = []
        for mine, segment in zip(torch.split(f0, counts), segments, strict=True):
            running = torch.cat([segment.cycles, mine.flatten().double()]).cumsum(0)
            segment.cycles = running[-1:].clone()
            cycles.append(running[1:].view(-1, hop))
        phase = (torch.cat(cycles) / config.sample_rate_hz).frac_().mul_(2 * math.pi).float()
        order = torch.floor(config.harmonics_below_hz / f0) + 0.5
        below = 2 * torch.sin(phase * 0.5)
        pulses = torch.where(below.abs() <= _NEAR_PULSE, order, torch.sin(order * phase) / below) - 0.5
        return list(torch.split(torch.where(voiced, pulses, 0.0), counts))

    def _take_windows(self, segment: _Segment, count: int) -> Tensor:
        """The next `count` windows of the pulse train, [count, window_samples]."""
        length, hop = self.config.window_samples, self.config.hop_samples
        if not count:
            return segment.pulses.new_zeros(0, length)
        windows = segment.pulses.flatten().unfold(0, length, hop)[:count]
        assert segment.mirrored and len(windows) == count, "spectra came before their f0"
        segment.pulses = segment.pulses[count:].clone()
        return windows

    def _noise(self, state: SynthesisState, count: int) -> Tensor:
        """Uniform numbers for the next `count` frames, float32 [count, bins, 2]: in (0, 1] and in [0, 1)."""
        bins = self.config.bins
        frame_counts = -(-bins // _WORDS_PER_COUNT)
        frame_words = frame_counts * _WORDS_PER_COUNT
        generator = np.random.Philox(key=state.seed, counter=state.frames_done * frame_counts)
        words = generator.random_raw(count * frame_words).view(np.uint32)
        uniform = words.reshape(count, frame_words, 2)[:, :bins].astype(np.float32)
        uniform[..., 0] += 1
        uniform *= np.float32(2.0**-32)
        return torch.from_numpy(uniform).to(self._window.device)

    def _synthesise(self, windows: Tensor, spectra: Tensor, uniform: Tensor) -> Tensor:
        """The windowed waveform of each frame, [N, window_samples]."""
        if not len(windows):
            return windows  # some FFT libraries refuse an empty batch
        lh, theta, ln, lr, phi = spectra.unbind(1)
        source = torch.fft.rfft(windows * self._analysis)
        magnitudes = torch.stack([lh, ln, lr]).clamp_max_(self.config.log_magnitude_ceiling).exp_()
        magnitudes[1] *= uniform[..., 0].log().mul_(-2).sqrt_()
        angles = torch.stack([theta.tanh().mul_(math.pi), uniform[..., 1] * (2 * math.pi), phi])
        real, imaginary = angles.cos().mul_(magnitudes), angles.sin_().mul_(magnitudes)
        spectrum = source.mul_(torch.complex(real[0], imaginary[0]))
        spectrum += torch.complex(real[1].add_(real[2]), imaginary[1].add_(imaginary[2]))
        frames: Tensor = torch.fft.irfft(spectrum, self.config.window_samples)
        return frames.mul_(self._window)

    def _overlap_add(self, frames: Tensor, pitch: Pitch) -> Tensor:
        """The samples that no later window of the segment will touch."""
        state, segment = pitch.state, pitch.state.segment
        hop, hops, count = self.config.hop_samples, self.config.window_hops, len(frames)
        blocks = torch.cat([segment.overlap, frames.new_zeros(count, hop)])
        for offset, column in enumerate(frames.view(count, hops, hop).unbind(1)):
            blocks[offset : offset + count] += column
        begin = segment.frames_done
        segment.frames_done += count
        state.frames_done += count
        complete = count
        if pitch.segment_end and segment.frames_done:
            complete += hops // 2  # the rest of the last windows lies outside the segment
        segment.overlap = blocks[count:]
        samples = blocks[:complete] / self._covered(begin, complete, segment.frames_done)
        if pitch.segment_end:
            state.segment = self._new_segment()
        return samples[max(0, hops // 2 - begin) :].flatten()

    def _covered(self, begin: int, count: int, num_frames: int) -> Tensor:
        """Summed squared windows over `count` blocks of a segment of `num_frames`, [count or 1, hop]."""
        hops = self.config.window_hops
        if begin >= hops - 1 and begin + count <= num_frames:
            return self._power.sum(0, keepdim=True)
        frames = torch.arange(begin, begin + count)[:, None] - torch.arange(hops)  # whose windows lie there
        inside = ((frames >= 0) & (frames < num_frames)).to(self._power)
        return (inside @ self._power).clamp_min_(_LEAST_OVERLAP)


def _mirror(blocks: Tensor, before: int, after: int) -> Tensor:
    """The signal in `blocks` [n, hop], mirrored at its ends for `before` and `after` samples more."""
    if not before and not after:
        return blocks
    signal = blocks.flatten()
    period = max(1, 2 * (len(signal) - 1))
    position = torch.arange(-before, len(signal) + after, device=signal.device) % period
    return signal[torch.minimum(position, period - position)].view(-1, blocks.shape[1])
