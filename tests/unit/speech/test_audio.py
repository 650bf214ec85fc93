"""Recordings in and files out: what is accepted, what is refused and in which words."""

from __future__ import annotations

import base64
import io
import struct

import numpy as np
import pytest

soundfile = pytest.importorskip("soundfile")

from tritone.audio import (  # noqa: E402
    ENCODINGS,
    AudioEncoder,
    AudioLimits,
    base64_s16,
    check_samples,
    decode_audio,
    encode_audio,
    resample,
    to_s16,
)
from tritone.errors import Cancelled, InvalidRequest, Unsupported  # noqa: E402

LIMITS = AudioLimits(max_seconds=5.0)
RATE_HZ = 24000
TONE = (0.3 * np.sin(np.arange(3 * RATE_HZ) * 0.05)).astype(np.float32)


def file_of(samples, kind, rate_hz=RATE_HZ, subtype=None):
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=kind, subtype=subtype)
    return file.getvalue()


def wav_with(offset, layout, value):
    """A WAV file with one number of its header changed."""
    data = bytearray(file_of(TONE, "WAV"))
    struct.pack_into(layout, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("kind", "subtype", "error"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "FLOAT", 0),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.05),
        ("MP3", None, 0.05),
    ],
)
def test_files_are_read(kind, subtype, error):
    samples, rate_hz = decode_audio(file_of(TONE, kind, subtype=subtype), LIMITS)
    assert rate_hz == RATE_HZ and samples.dtype == np.float32
    assert len(samples) == len(TONE)
    np.testing.assert_allclose(samples[2000:-2000], TONE[2000:-2000], atol=error)


def test_channels_are_mixed():
    stereo = np.stack([TONE, np.zeros_like(TONE)], axis=1)
    samples, _ = decode_audio(file_of(stereo, "WAV", subtype="FLOAT"), LIMITS)
    np.testing.assert_allclose(samples, TONE / 2, atol=1e-7)


@pytest.mark.parametrize(
    "wrap", [base64.b64encode, base64.encodebytes, lambda d: b"data:audio/wav;base64," + base64.b64encode(d)]
)
@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_base64_text_of_a_file_is_read(wrap, kind):
    data = file_of(TONE, kind)
    np.testing.assert_array_equal(decode_audio(wrap(data), LIMITS)[0], decode_audio(data, LIMITS)[0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "audio is empty"),
        (b"hello, this is a text", "audio is not a recording that can be read"),
        (bytes(1000), "audio is not a recording that can be read"),
        (b"UklGRg==", "audio is not a recording that can be read"),
        (file_of(TONE, "WAV")[:30], "audio is not a recording that can be read"),
        (file_of(TONE, "WAV")[:44], "audio holds no samples"),
        (wav_with(24, "<I", 1), "audio has a sample rate of 1 Hz; send sound at 4000 to 192000 Hz"),
        (wav_with(24, "<I", 2**31 - 1), "audio has a sample rate of 2147483647 Hz"),
        (file_of(np.zeros((100, 20)), "WAV"), "audio has 20 channels; send at most 8"),
        (file_of(np.zeros(6 * RATE_HZ), "FLAC"), "audio lasts 6.0 s; send at most 5 s"),
        (file_of(np.full(100, np.nan), "WAV", subtype="FLOAT"), "audio holds NaN"),
    ],
)
def test_what_is_no_recording_is_refused(data, words):
    with pytest.raises(InvalidRequest, match=words):
        decode_audio(data, LIMITS)


def test_a_header_that_promises_too_much_is_not_believed():
    """Refused by its length before a sample is read; a short file in a long promise is read to its end."""
    data = wav_with(40, "<I", 2**31)
    samples, _ = decode_audio(data, LIMITS)
    assert len(samples) == len(TONE)


def test_a_length_that_no_header_tells_is_limited_too():
    encoder = AudioEncoder("flac", RATE_HZ)
    data = encoder.push(np.zeros(6 * RATE_HZ, np.float32)) + encoder.finish()
    with pytest.raises(InvalidRequest, match=r"audio\[1\] lasts"):
        decode_audio(data, LIMITS, "audio[1]")


def test_a_recording_that_nobody_wants_any_more_is_left_where_it_is():
    blocks = iter(range(3))

    def check():
        if next(blocks) == 1:
            raise Cancelled("the client left")

    with pytest.raises(Cancelled):
        decode_audio(file_of(TONE, "WAV"), LIMITS, check=check)


@pytest.mark.parametrize(
    ("samples", "rate_hz", "words"),
    [
        (TONE, 1, "audio_input_rate is 1 Hz"),
        (TONE, 10**9, "audio_input_rate is 1000000000 Hz"),
        (TONE, None, "audio_input_rate is None"),
        (TONE, 16000.5, "audio_input_rate is 16000.5"),
        (TONE[:0], RATE_HZ, "audio_input is empty"),
        (TONE * np.nan, RATE_HZ, "audio_input holds NaN"),
        (np.full(10, np.inf, np.float32), RATE_HZ, "audio_input holds NaN or infinite"),
        (TONE * 32768, RATE_HZ, r"audio_input has samples of up to 9830.\d; scale them"),
        (to_s16(TONE), RATE_HZ, "audio_input is int16 of shape"),
        (TONE.reshape(2, -1), RATE_HZ, r"audio_input is float32 of shape \[2, 36000\]"),
        (np.zeros(20 * 60 * 16000, np.float32), 16000, "audio_input lasts 1200.0 s"),
    ],
)
def test_raw_samples_are_checked(samples, rate_hz, words):
    with pytest.raises(InvalidRequest, match=words):
        check_samples(samples, rate_hz, LIMITS)


def test_good_raw_samples_pass():
    samples, rate_hz = check_samples(TONE.astype(np.float64), np.int32(RATE_HZ), LIMITS)
    assert samples.dtype == np.float32 and rate_hz == RATE_HZ


def test_resampling_keeps_the_length_in_seconds():
    assert len(resample(TONE, RATE_HZ, 16000)) == 2 * len(TONE) // 3
    assert resample(TONE, RATE_HZ, RATE_HZ) is TONE


def test_s16_is_nearest_clipped_and_exact_for_what_was_s16():
    every = np.arange(-32768, 32768, dtype=np.int16)
    np.testing.assert_array_equal(to_s16(every.astype(np.float32) / 32768), every)
    np.testing.assert_array_equal(
        to_s16(np.float32([2, -2, 0.6 / 32768, -0.6 / 32768])), [32767, -32768, 1, -1]
    )
    assert base64.b64decode(base64_s16(TONE)) == to_s16(TONE).tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("chunk", [1, 4800, 11111, len(TONE)])
def test_encoder_chunks_concatenate_to_one_file(encoding, chunk):
    samples = TONE[:200] if chunk == 1 else TONE
    encoder = AudioEncoder(encoding, RATE_HZ)
    parts = [encoder.push(samples[begin : begin + chunk]) for begin in range(0, len(samples), chunk)]
    read, rate_hz = decode_audio(b"".join(parts) + encoder.finish(), LIMITS)
    assert rate_hz == RATE_HZ and len(read) == len(samples)
    if encoding != "opus":
        np.testing.assert_array_equal(to_s16(read), to_s16(samples))
    elif chunk > 1:
        np.testing.assert_allclose(read[2000:-2000], samples[2000:-2000], atol=0.05)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sound_leaves_the_encoder_soon(encoding):
    encoder = AudioEncoder(encoding, RATE_HZ)
    encoder.push(TONE[: RATE_HZ // 2])
    assert encoder.push(TONE[: RATE_HZ // 4]), "a quarter of a second must come out"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_whole_file_knows_its_length(encoding):
    file = soundfile.SoundFile(io.BytesIO(encode_audio(TONE, RATE_HZ, encoding)))
    assert (file.frames, file.samplerate, file.channels) == (len(TONE), RATE_HZ, 1)
    assert len(file.read()) == len(TONE)


def test_unknown_encodings_are_refused():
    with pytest.raises(InvalidRequest, match="audio_format is 'aac'; use one of wav, flac, opus"):
        AudioEncoder("aac", RATE_HZ)
    with pytest.raises(Unsupported, match="opus cannot carry 22050 Hz"):
        AudioEncoder("opus", 22050)
