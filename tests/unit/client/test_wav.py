import numpy as np
import pytest
import soundfile
from fake_triton import counting_samples

from tritone_client import AudioChunk, BrokenStream, InvalidRequest, WavWriter, write_wav


def chunk(offset: int, num_samples: int, dtype=np.int16, rate_hz: int = 24_000) -> AudioChunk:
    samples = counting_samples(offset, num_samples)
    return AudioChunk(samples if dtype == np.int16 else samples.astype(dtype) / 32768, rate_hz, offset, 0)


def test_chunks_are_in_the_file_before_the_answer_ends(tmp_path):
    path = tmp_path / "reply.wav"
    with WavWriter(path) as wav:
        wav.write(chunk(0, 30_000))
        assert path.stat().st_size > 50_000
        wav.write(chunk(30_000, 500))
        assert wav.audio_s == pytest.approx(30_500 / 24_000)
    samples, rate_hz = soundfile.read(path, dtype="int16")
    assert rate_hz == 24_000
    np.testing.assert_array_equal(samples, counting_samples(0, 30_500))


def test_float_samples_keep_their_precision(tmp_path):
    with WavWriter(tmp_path / "reply.wav") as wav:
        wav.write(chunk(0, 100, np.float32))
    assert soundfile.info(tmp_path / "reply.wav").subtype == "FLOAT"
    samples, _ = soundfile.read(tmp_path / "reply.wav", dtype="float32")
    np.testing.assert_array_equal(samples, chunk(0, 100, np.float32).samples)


@pytest.mark.parametrize(
    "second", [chunk(401, 10), chunk(399, 10), chunk(400, 10, np.float32), chunk(400, 10, rate_hz=16_000)]
)
def test_chunks_that_do_not_follow_are_refused(tmp_path, second):
    with WavWriter(tmp_path / "reply.wav") as wav:
        wav.write(chunk(0, 400))
        with pytest.raises(BrokenStream):
            wav.write(second)
    assert soundfile.info(tmp_path / "reply.wav").frames == 400


def test_no_chunk_leaves_no_file(tmp_path):
    with WavWriter(tmp_path / "reply.wav") as wav:
        assert wav.audio_s == 0
    wav.close()
    assert list(tmp_path.iterdir()) == []


def test_bad_paths_are_known_at_once(tmp_path):
    with pytest.raises(InvalidRequest, match=r"\.wav"):
        WavWriter(tmp_path / "reply.mp3")
    with pytest.raises(FileNotFoundError):
        WavWriter(tmp_path / "no_such_folder" / "reply.wav")
    with pytest.raises(InvalidRequest, match=r"\.wav"):
        write_wav(tmp_path / "reply", np.zeros(3, dtype=np.int16), 24_000)


def test_write_wav(tmp_path):
    write_wav(tmp_path / "a.WAV", counting_samples(0, 10), 16_000)
    samples, rate_hz = soundfile.read(tmp_path / "a.WAV", dtype="int16")
    assert rate_hz == 16_000 and samples.tolist() == counting_samples(0, 10).tolist()
