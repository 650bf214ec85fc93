"""Synthesis as a stream: independent of chunks, neighbours and what else the answer holds."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tritone.networks.pulse_synthesis import Pitch, PulseSynthesis, SignalConfig  # noqa: E402

CONFIG = SignalConfig(
    sample_rate_hz=8000,
    hop_samples=40,
    bins=81,
    voiced_above_hz=40.0,
    harmonics_below_hz=3600.0,
    log_magnitude_ceiling=7.0,
)
SCHEDULES = {
    "single frames": [1] * 300,
    "4 then 25": [4, *[25] * 12],
    "ragged": [3, 1, 40, 2, 17, 5, 60, 1, 1, 150],
    "one chunk": [300],
    "empty calls": [0, 30, 0, 0, 70, 0, 200],
}


@pytest.fixture(scope="module")
def synthesis():
    return PulseSynthesis(CONFIG)


def random_input(num_frames, seed=0):
    """f0 [F] with voiced and unvoiced stretches, spectra [F, 5, bins]."""
    rng = np.random.default_rng(seed)
    f0 = 120 + 40 * np.sin(np.arange(num_frames) / 9) + rng.normal(0, 2, num_frames)
    f0[(np.arange(num_frames) // 17) % 3 == 2] = 0
    spectra = rng.normal(0, 1, (num_frames, 5, CONFIG.bins))
    spectra[:, [0, 2, 3]] -= 2
    return torch.from_numpy(f0).float(), torch.from_numpy(spectra).float()


def streamed(synthesis, f0, spectra, sizes, state=None, behind=None):
    """Samples of one segment; spectra come `behind` frames after f0."""
    state = state or synthesis.new_state(seed=7)
    behind = CONFIG.lookahead_frames if behind is None else behind
    parts, begin, used = [], 0, 0
    for size in sizes:
        end = min(len(f0), begin + size)
        last = end == len(f0)
        ready = end if last else max(used, end - behind)
        parts += synthesis([Pitch(f0[begin:end], state, last)], spectra[used:ready], [ready - used])
        begin, used = end, ready
        if last:
            break
    return torch.cat(parts)


@pytest.mark.parametrize("behind", [CONFIG.lookahead_frames, 27])
@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 30, 200])
def test_streamed_equals_whole(synthesis, sizes, num_frames, behind):
    f0, spectra = random_input(num_frames)
    once = streamed(synthesis, f0, spectra, [num_frames])
    assert once.shape == (num_frames * CONFIG.hop_samples,)
    torch.testing.assert_close(
        streamed(synthesis, f0, spectra, sizes, behind=behind), once, rtol=0, atol=1e-5
    )


def test_noise_depends_on_seed_and_frame_of_the_answer_alone(synthesis):
    f0, spectra = random_input(60)
    spectra[:, [0, 3]] = -30  # nothing but noise

    def answer(seed, *lengths):
        state, begin, parts = synthesis.new_state(seed), 0, []
        for length in lengths:
            end = begin + length
            parts.append(streamed(synthesis, f0[begin:end], spectra[begin:end], [7] * 20, state))
            begin = end
        return torch.cat(parts)

    inside = slice(24 * CONFIG.hop_samples, 56 * CONFIG.hop_samples)  # away from the edges of any segment
    torch.testing.assert_close(answer(1, 60)[inside], answer(1, 20, 40)[inside], rtol=0, atol=1e-5)
    assert (answer(1, 60) - answer(2, 60)).abs().max() > 0.01
    assert (answer(1, 30, 30)[:1200] - answer(1, 30, 30)[1200:]).abs().max() > 0.01


def test_noise_is_gaussian(synthesis):
    uniform = synthesis._noise(synthesis.new_state(5), 400)
    radius = (-2 * uniform[..., 0].log()).sqrt()
    values = torch.cat(
        [
            radius * torch.cos(2 * torch.pi * uniform[..., 1]),
            radius * torch.sin(2 * torch.pi * uniform[..., 1]),
        ]
    )
    assert abs(values.mean()) < 0.01 and abs(values.var() - 1) < 0.02
    assert abs(((values / values.std()) ** 4).mean() - 3) < 0.1


def test_neighbours_change_nothing(synthesis):
    inputs = [random_input(length, length) for length in (5, 61, 140)]
    alone = [streamed(synthesis, f0, spectra, [300]) for f0, spectra in inputs]
    pitches = [Pitch(f0, synthesis.new_state(seed=7), segment_end=True) for f0, _ in inputs]
    spectra = torch.cat([spectra for _, spectra in inputs])
    together = synthesis(pitches, spectra, [len(f0) for f0, _ in inputs])
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_phase_runs_on_from_chunk_to_chunk(synthesis):
    f0 = torch.full((100,), 200.0)
    spectra = torch.zeros(100, 5, CONFIG.bins)
    spectra[:, 1:] = -30
    spectra[:, [1, 4]] = 0  # all harmonics as they are, no noise
    samples = streamed(synthesis, f0, spectra, [9] * 20)[400:-400]
    period = CONFIG.sample_rate_hz // 200
    torch.testing.assert_close(samples[period:], samples[:-period], rtol=0, atol=1e-3)
    assert samples.abs().max() > 0.01


def test_state_does_not_grow(synthesis):
    f0, spectra = random_input(300)
    state = synthesis.new_state(1)
    for begin in range(0, 270, 10):
        synthesis(
            [Pitch(f0[begin : begin + 10], state, False)],
            spectra[max(0, begin - 10) : begin],
            [10 if begin else 0],
        )
        assert len(state.segment.pulses) <= 20
        assert state.segment.pulses.untyped_storage().nbytes() <= 20 * CONFIG.hop_samples * 4


def test_an_odd_window_is_refused():
    with pytest.raises(ValueError, match="even number of hops"):
        PulseSynthesis(SignalConfig(8000, 50, 81, 40.0, 3600.0, 7.0))
