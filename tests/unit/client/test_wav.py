import asyncio

import numpy as np
import pytest
import soundfile
from fake_triton import counting_samples

from tritone_client import AudioChunk, BrokenStream, InvalidRequest, WavWriter, write_wav


def chunk(offset: int, num_samples: int, dtype=np.int16, rate_hz: int = 24_000) -> AudioChunk:
    samples = counting_samples(offset, num_samples)
    return AudioChunk(samples if dtype == np.int16 else samples.astype(dtype) / 32768, rate_hz, offset, 0)


def test_chunks_are_on_the_disk_before_the_answer_ends(tmp_path):
    path = tmp_path / "reply.wav"
    with WavWriter(path) as wav:
        wav.write(chunk(0, 30_000))
        [draft] = tmp_path.iterdir()
        assert draft.stat().st_size > 50_000 and draft != path
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


def test_a_file_that_is_there_is_replaced_when_all_chunks_came(tmp_path):
    path, link = tmp_path / "reply.wav", tmp_path / "link.wav"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    with WavWriter(link) as wav:
        wav.write(chunk(0, 30_000))
        assert path.read_bytes() == b"old"
    assert soundfile.info(path).frames == 30_000
    assert path.stat().st_mode & 0o777 == 0o640 and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, path]


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_an_error_leaves_a_file_that_is_there_as_it_was(tmp_path, num_chunks):
    path = tmp_path / "reply.wav"
    path.write_bytes(b"old")
    with pytest.raises(BrokenStream), WavWriter(path) as wav:
        for _ in range(num_chunks):
            wav.write(chunk(0, 400))
        raise BrokenStream("gone")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_no_chunk_leaves_a_file_that_is_there_as_it_was(tmp_path):
    path = tmp_path / "reply.wav"
    path.write_bytes(b"old")
    with WavWriter(path):
        pass
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, asyncio.CancelledError])
def test_who_stops_an_answer_keeps_what_was_heard(tmp_path, stop):
    path = tmp_path / "reply.wav"
    path.write_bytes(b"old")
    with pytest.raises(stop), WavWriter(path) as wav:
        wav.write(chunk(0, 400))
        raise stop
    assert soundfile.info(path).frames == 400


def test_bad_paths_are_known_at_once(tmp_path):
    (tmp_path / "folder.wav").mkdir()
    with pytest.raises(InvalidRequest, match="no ordinary file"):
        WavWriter(tmp_path / "folder.wav")
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
