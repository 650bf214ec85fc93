"""Sound that says where it comes from: every codec frame names its request and its own place.

    voice, number ─► 16 digits of 3 bits ─► a sinusoid a digit, in a band of its own ─► 320 samples
                     8 voice │ 8 number       multiples of 50 Hz: orthogonal over a frame

A request is heard as a chord of its own, and its frames as a counter above that. What was lost, doubled,
reordered, cut off or taken from another request is then a fact about the samples, and `decode` tells it.
All samples are whole parts of 1/32768: sums are exact in any order, and 16 bits lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tritone.ports import Array

SAMPLE_RATE_HZ = 16000
FRAME_SAMPLES = 320  # 50 frames a second
MAX_NUMBER = (1 << 24) - 1

_DIGITS = 8  # of the voice, and as many of the number
_BITS = 3  # of a digit
_LOUDNESS = 0.9 / (2 * _DIGITS)  # of one sinusoid, so that their sum never clips
_PARTS = 32768  # of full scale
_SHIFTS = np.arange(_DIGITS) * _BITS


def voice_of(seed: int) -> int:
    """The voice of a request, 24 bits: two seeds below 2^24 never share one."""
    folded = (seed ^ (seed >> 24) ^ (seed >> 48)) & MAX_NUMBER
    return folded * 0x9E3779 & MAX_NUMBER


def _sinusoids() -> Array:
    """float32 [bands * 8, FRAME_SAMPLES]: what each value of each digit sounds like."""
    bins = np.arange(1, 2 * _DIGITS * (1 << _BITS) + 1)[:, None]
    phase = np.pi * bins**2 / len(bins)  # apart, so that the sum has no peak
    turns = 2 * np.pi * bins * np.arange(FRAME_SAMPLES) / FRAME_SAMPLES
    waves: Array = np.rint(_PARTS * _LOUDNESS * np.cos(turns + phase)) / _PARTS
    return waves.astype(np.float32)


_SINUSOIDS = _sinusoids()


def encode(frames: Array) -> Array:
    """frames: int [F, 2], voice and number of each. Gives float32 [F * FRAME_SAMPLES] in [-1, 1]."""
    digits = (frames[:, :, None] >> _SHIFTS & (1 << _BITS) - 1).reshape(len(frames), 2 * _DIGITS)
    rows = digits + np.arange(digits.shape[1]) * (1 << _BITS)
    chosen = np.zeros((len(frames), len(_SINUSOIDS)), np.float32)
    chosen[np.arange(len(frames))[:, None], rows] = 1
    samples: Array = (chosen @ _SINUSOIDS).reshape(-1)
    return samples


@dataclass(frozen=True, eq=False)
class Heard:
    """What samples say, frame by frame in the order of their arrival."""

    voices: Array  # int64 [F]; -1 where the samples are no frame at all
    numbers: Array  # int64 [F]; -1 likewise
    cut_samples: int  # after the last whole frame

    def faults(self, voice: int, num_frames: int | None = None) -> dict[str, str]:
        """What is wrong with an answer that should be the frames of `voice` from 0 on: kind to which.

        num_frames: how many there should be; None for an answer that was ended early. {} is a right answer.
        """
        own = self.numbers[self.voices == voice]
        ends = num_frames if num_frames is not None else int(own.max(initial=-1)) + 1
        missing = np.setdiff1d(np.arange(ends), own)
        lost = missing[missing < own.max(initial=-1)]
        found = {
            "damaged": np.flatnonzero(self.voices < 0),
            "foreign": np.flatnonzero((self.voices >= 0) & (self.voices != voice)),
            "lost": lost,
            "truncated": missing[len(lost) :],
            "doubled": np.unique(own[_seen_before(own)]),
            "reordered": own[1:][np.diff(own) < 0],
            "beyond": own[own >= ends],
        }
        faults = {kind: f"frames {_shortened(which)}" for kind, which in found.items() if len(which)}
        if self.cut_samples:
            faults["cut"] = f"{self.cut_samples} samples at the end"
        return faults


def decode(samples: Array) -> Heard:
    """samples: a whole answer from its first sample on, float32 in [-1, 1] or int16, [n]."""
    if samples.dtype == np.int16:
        samples = samples.astype(np.float32) / _PARTS
    num_frames, cut = divmod(len(samples), FRAME_SAMPLES)
    blocks = samples[: num_frames * FRAME_SAMPLES].reshape(num_frames, FRAME_SAMPLES)
    loudness = np.abs(np.fft.rfft(blocks, axis=1))[:, 1 : len(_SINUSOIDS) + 1]
    digits = loudness.reshape(num_frames, 2, _DIGITS, 1 << _BITS).argmax(axis=3)
    frames = (digits << _SHIFTS).sum(axis=2)
    frames[(encode(frames).reshape(blocks.shape) != blocks).any(axis=1)] = -1
    return Heard(frames[:, 0], frames[:, 1], cut)


def _seen_before(numbers: Array) -> Array:
    """bool [n]: whether each number came earlier as well."""
    seen = np.ones(len(numbers), bool)
    seen[np.unique(numbers, return_index=True)[1]] = False
    return seen


def _shortened(which: Array) -> str:
    shown = ", ".join(map(str, which[:5].tolist()))
    return shown + (f" … ({len(which)} in all)" if len(which) > 5 else "")
