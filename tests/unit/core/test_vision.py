"""Pictures and videos that callers send: read as they should look, or refused in one sentence."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tritone.errors import Cancelled, InvalidRequest
from tritone.vision import IMAGE_FORMATS, VideoLimits, decode_image, decode_video, num_frames

av = pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")

MAX_PIXELS = 1 << 20
FPS = 4
# Red, green / blue, white: every turn and flip of it differs.
CORNERS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)
PICTURE = CORNERS.repeat(16, axis=0).repeat(24, axis=1)  # 32 high, 48 wide


def encoded(pixels: np.ndarray, form: str = "PNG", mode: str | None = None, **options: object) -> bytes:
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, form, **options)
    return file.getvalue()


def video_of(
    frames: np.ndarray,
    sound: np.ndarray | None = None,
    *,
    fps: int = FPS,
    rate_hz: int = 16000,
    turned: int = 0,
    container: str = "matroska",
) -> bytes:
    """A lossless video; sound: float32 [channels, n]."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        pictures = out.add_stream("ffv1", rate=fps) if len(frames) else None
        if pictures is not None:
            pictures.height, pictures.width = frames.shape[1:3]
            pictures.pix_fmt = "bgr0"
            if turned:
                pictures.set_display_rotation(turned)
        if sound is not None:
            layout = "mono" if len(sound) == 1 else "stereo"
            track = out.add_stream("pcm_f32le", rate=rate_hz, layout=layout)
            heard = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(sound.T).reshape(1, -1), format="flt", layout=layout
            )
            heard.sample_rate, heard.pts, heard.time_base = rate_hz, 0, Fraction(1, rate_hz)
            out.mux([*track.encode(heard), *track.encode()])
        for place, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = place, Fraction(1, fps)
            out.mux(pictures.encode(picture))
        if pictures is not None:
            out.mux(pictures.encode())
    return file.getvalue()


def numbered(count: int) -> np.ndarray:
    """Frames that are as bright as their number."""
    return np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(16, 1).repeat(16, 2).repeat(3, 3)


def of_jpegs(sizes: list[tuple[int, int]], header: tuple[int, int]) -> bytes:
    """A video of JPEG pictures of any size (width, height) behind a header that says `header`."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        pictures = out.add_stream("mjpeg", rate=FPS)
        pictures.width, pictures.height = header
        pictures.pix_fmt = "yuvj420p"
        for place, (width, height) in enumerate(sizes):
            packet = av.Packet(encoded(np.full((height, width, 3), 40 * place, np.uint8), "JPEG"))
            packet.stream, packet.time_base = pictures, Fraction(1, FPS)
            packet.pts = packet.dts = place
            out.mux(packet)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


# -- pictures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", IMAGE_FORMATS)
def test_every_format_is_read(form: str) -> None:
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(form, {})
    pixels = decode_image(encoded(PICTURE, form, **options), MAX_PIXELS)
    assert pixels.shape == (32, 48, 3) and pixels.dtype == np.uint8
    tolerance = 4 if form == "JPEG" else 0
    assert np.abs(pixels.astype(int) - PICTURE).max() <= tolerance


def test_base64_and_data_uris_are_unwrapped() -> None:
    text = base64.b64encode(encoded(PICTURE))
    for data in (text, b"data:image/png;base64," + text, text[:70] + b"\n" + text[70:]):
        assert np.array_equal(decode_image(data, MAX_PIXELS), PICTURE)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = {  # how a camera that was held that way stores the picture
        1: PICTURE,
        2: PICTURE[:, ::-1],
        3: PICTURE[::-1, ::-1],
        4: PICTURE[::-1],
        5: PICTURE.transpose(1, 0, 2),
        6: np.rot90(PICTURE),
        7: PICTURE.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(PICTURE, -1),
    }[orientation]
    assert np.array_equal(decode_image(encoded(np.ascontiguousarray(stored), exif=exif), MAX_PIXELS), PICTURE)


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "LA", "1"])
def test_every_kind_of_pixel_becomes_rgb(mode: str) -> None:
    grey = np.repeat(np.repeat(np.array([[0, 255], [255, 0]], np.uint8), 8, 0), 8, 1)
    pixels = decode_image(encoded(grey, mode=mode), MAX_PIXELS)
    assert np.array_equal(pixels, grey[:, :, None].repeat(3, axis=2))


def test_transparent_pixels_keep_their_colour() -> None:
    clear = np.dstack([PICTURE, np.zeros((32, 48), np.uint8)])
    assert np.array_equal(decode_image(encoded(clear), MAX_PIXELS), PICTURE)


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    grey = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    assert np.array_equal(decode_image(encoded(grey), MAX_PIXELS)[..., 0], np.arange(256).reshape(16, 16))


def test_the_limit_is_a_number_of_pixels() -> None:
    assert decode_image(encoded(PICTURE), 32 * 48).shape == (32, 48, 3)
    with pytest.raises(InvalidRequest, match=r"^photo has 48 x 32 pixels; send at most 1535 in all$"):
        decode_image(encoded(PICTURE), 32 * 48 - 1, "photo")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [1025, 12_000, 60_000])
def test_a_bomb_is_refused_by_its_header(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(InvalidRequest, match="pixels; send at most 1048576 in all"):
        decode_image(png_header(side, side), MAX_PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        encoded(PICTURE)[:-60],
        encoded(np.random.RandomState(0).randint(0, 255, (64, 64, 3), np.uint8), "JPEG")[:900],
        encoded(PICTURE)[:20],
        b"GIF89a",
        b"just some words, and no picture at all",
        base64.b64encode(b"words in base64 are words, whatever they are wrapped in, however many there are"),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
)
def test_what_is_no_picture_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^image (cannot be read as a picture \(.+\)|is not a picture); send PNG"
    ) as refusal:
        decode_image(data, MAX_PIXELS)
    assert "\n" not in str(refusal.value) and "0x" not in str(refusal.value)


def test_nothing_is_no_picture_and_no_video() -> None:
    with pytest.raises(InvalidRequest, match="image is empty"):
        decode_image(b"", MAX_PIXELS)
    with pytest.raises(InvalidRequest, match="video is empty"):
        decode_video(b"", VideoLimits())


# -- which frames of a video --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "rate_hz", "count"),
    [
        (1, 4.0, 1),
        (2, 4.0, 2),
        (3, 4.0, 2),
        (4, 4.0, 4),
        (12, 8.0, 4),  # 1.5 s would give three
        (75, 25.0, 6),
        (70, 25.0, 6),  # 2.8 s: 5.6 frames
        (250, 25.0, 20),
        (10_000, 25.0, 768),
    ],
)
def test_number_of_frames(total: int, rate_hz: float, count: int) -> None:
    assert num_frames(total, rate_hz, VideoLimits()) == count


def test_number_of_frames_is_even_under_an_odd_limit() -> None:
    assert num_frames(250, 25.0, VideoLimits(max_frames=7)) == 6
    assert num_frames(250, 25.0, VideoLimits(frames_per_second=1.0)) == 10


def test_frames_are_spread_from_the_first_to_the_last() -> None:
    video = decode_video(video_of(numbered(13)), VideoLimits())
    assert video.frames.shape == (6, 16, 16, 3) and video.frames.dtype == np.uint8
    assert video.frames[:, 0, 0, 0].tolist() == [0, 2, 5, 7, 10, 12]
    assert video.rate_hz == pytest.approx(6 / (13 / FPS))
    assert video.samples is None


@pytest.mark.parametrize(("total", "places"), [(1, [0]), (2, [0, 1]), (3, [0, 2])])
def test_very_short_videos(total: int, places: list[int]) -> None:
    video = decode_video(video_of(numbered(total)), VideoLimits())
    assert video.frames[:, 0, 0, 0].tolist() == places
    assert video.rate_hz == pytest.approx(len(places) * FPS / total)


def test_colours_and_base64() -> None:
    data = video_of(np.stack([PICTURE] * 4))
    for form in (data, base64.b64encode(data)):
        assert np.array_equal(decode_video(form, VideoLimits()).frames, np.stack([PICTURE] * 4))


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp4", "mpeg4"),
        ("mov", "mpeg4"),
        ("matroska", "mpeg4"),
        ("avi", "mpeg4"),
        ("mpegts", "mpeg2video"),
        ("webm", "libvpx"),
    ],
)
def test_every_container_is_read(container: str, codec: str) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this build of av has no {codec}")
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        pictures = out.add_stream(codec, rate=25)
        pictures.width = pictures.height = 32
        pictures.pix_fmt = "yuv420p"
        for brightness in range(0, 250, 10):
            frame = np.full((32, 32, 3), brightness, np.uint8)
            out.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(pictures.encode())
    video = decode_video(file.getvalue(), VideoLimits())
    assert video.frames.shape == (4, 32, 32, 3) and video.rate_hz == pytest.approx(4.0, abs=0.1)
    assert np.abs(video.frames.mean((1, 2, 3)) - [0, 80, 160, 240]).max() < 6


@pytest.mark.parametrize(("turned", "quarters"), [(90, 1), (180, 2), (-90, -1)])
def test_videos_stand_upright(turned: int, quarters: int) -> None:
    stored = np.ascontiguousarray(np.stack([np.rot90(PICTURE, -quarters)] * 4))
    frames = decode_video(video_of(stored, turned=turned), VideoLimits()).frames
    assert np.array_equal(frames, np.stack([PICTURE] * 4))


def test_frames_of_another_size_are_scaled_to_the_first() -> None:
    video = decode_video(of_jpegs([(32, 16)] * 2 + [(64, 48)] * 2, header=(32, 16)), VideoLimits())
    assert video.frames.shape == (4, 16, 32, 3)
    assert np.abs(video.frames[:, 8, 8, 0].astype(int) - [0, 40, 80, 120]).max() <= 3


def test_a_header_that_promises_more_frames_than_can_be_decoded() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        pictures = out.add_stream("mjpeg", rate=FPS)
        pictures.width = pictures.height = 16
        pictures.pix_fmt = "yuvj420p"
        for place in range(8):
            whole = encoded(np.full((16, 16, 3), 20 * place, np.uint8), "JPEG")
            packet = av.Packet(whole if place < 5 else b"\xff\xd8\xff")
            packet.stream, packet.time_base = pictures, Fraction(1, FPS)
            packet.pts = packet.dts = place
            out.mux(packet)
    try:
        frames = decode_video(file.getvalue(), VideoLimits()).frames
    except InvalidRequest as refusal:
        assert "cannot be read as a video" in str(refusal)
    else:
        assert len(frames) == 4


# -- sound of a video ---------------------------------------------------------------------------------------


def tone(rate_hz: int, seconds: float = 2.0, hz: float = 440.0) -> np.ndarray:
    return np.sin(2 * np.pi * hz * np.arange(int(rate_hz * seconds)) / rate_hz).astype(np.float32)


def test_sound_at_the_right_rate_is_left_alone() -> None:
    samples = 0.5 * tone(16000)
    video = decode_video(video_of(numbered(8), samples[None]), VideoLimits(), 16000)
    assert video.samples_rate_hz == 16000 and np.array_equal(video.samples, samples)


@pytest.mark.parametrize("rate_hz", [8000, 44100, 48000])
def test_sound_is_resampled_and_mixed(rate_hz: int) -> None:
    both = np.stack([0.8 * tone(rate_hz), np.zeros(2 * rate_hz, np.float32)])
    samples = decode_video(video_of(numbered(8), both, rate_hz=rate_hz), VideoLimits(), 16000).samples
    assert samples is not None and samples.dtype == np.float32 and samples.ndim == 1
    assert abs(len(samples) - 32000) <= 32
    inner = slice(2000, 30000)
    assert np.abs(samples[inner] - 0.4 * tone(16000)[inner]).max() < 0.01


def test_sound_is_read_only_when_it_is_wanted() -> None:
    broken = tone(16000)
    broken[50] = np.nan
    data = video_of(numbered(8), broken[None])
    assert decode_video(data, VideoLimits()).samples is None
    with pytest.raises(InvalidRequest, match="the sound of clip holds NaN"):
        decode_video(data, VideoLimits(), 16000, "clip")


def test_a_silent_film_has_no_sound() -> None:
    with pytest.raises(InvalidRequest, match="video has no sound; leave use_audio_in_video out"):
        decode_video(video_of(numbered(8)), VideoLimits(), 16000)


# -- videos that are refused --------------------------------------------------------------------------------


def test_a_recording_is_no_video() -> None:
    data = video_of(np.zeros((0, 1, 1, 3), np.uint8), tone(16000)[None])
    with pytest.raises(InvalidRequest, match="video has no pictures; send a video, or the sound as audio"):
        decode_video(data, VideoLimits())


def test_a_video_may_last_so_long() -> None:
    limits = VideoLimits(max_seconds=3.0)
    assert len(decode_video(video_of(numbered(12)), limits).frames) == 6
    with pytest.raises(InvalidRequest, match=r"video is longer than 3 s; send a shorter one"):
        decode_video(video_of(numbered(13)), limits)


def test_sound_that_goes_on_after_the_pictures_is_limited() -> None:
    with pytest.raises(InvalidRequest, match="the sound of video is longer than 2 s"):
        decode_video(video_of(numbered(8), tone(16000, 4.0)[None]), VideoLimits(max_seconds=2.0), 16000)


def test_pixels_of_all_frames_count() -> None:
    data = video_of(numbered(8))  # four frames of 256 pixels are looked at
    assert len(decode_video(data, VideoLimits(max_pixels=1024)).frames) == 4
    with pytest.raises(InvalidRequest, match="16 x 16 pixels in each of 4 frames; send at most 1023"):
        decode_video(data, VideoLimits(max_pixels=1023))


def test_frames_larger_than_the_header_says_are_counted_as_they_are() -> None:
    data = of_jpegs([(400, 300)] * 8, header=(16, 16))
    with pytest.raises(InvalidRequest, match="video has 400 x 300 pixels in each of 4 frames"):
        decode_video(data, VideoLimits(max_pixels=4 * 300 * 300))


@pytest.mark.parametrize("kept", [10, 200, 0.5])
def test_a_truncated_file_gives_what_is_there_or_is_refused(kept: float) -> None:
    data = video_of(np.stack([PICTURE] * 8), container="mp4")
    cut = data[: int(kept * len(data)) if kept < 1 else int(kept)]
    with pytest.raises(InvalidRequest, match=r"^video (cannot be read as a video|has no)") as refusal:
        decode_video(cut, VideoLimits())
    assert "\n" not in str(refusal.value) and "<none>" not in str(refusal.value)


def test_half_a_stream_is_a_shorter_video() -> None:
    data = video_of(np.stack([PICTURE] * 16))
    frames = decode_video(data[: len(data) * 3 // 4], VideoLimits()).frames
    assert frames.shape[1:] == (32, 48, 3) and np.array_equal(frames[0], PICTURE)


def test_files_that_name_other_files_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.mkv").write_bytes(video_of(numbered(8)))
    monkeypatch.chdir(tmp_path)
    lists = (
        b"ffconcat version 1.0\nfile other.mkv\n",
        b"ffconcat version 1.0\nfile 'file:other.mkv'\n",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nother.mkv\n#EXT-X-ENDLIST\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
        b"a=rtpmap:96 H264/90000\n",
    )
    for data in (*lists, base64.b64encode(lists[0] * 2)):
        with pytest.raises(InvalidRequest, match="video cannot be read as a video"):
            decode_video(data, VideoLimits())


@pytest.mark.parametrize("data", [b"words, and no video at all", bytes(4096), encoded(PICTURE)], ids=len)
def test_what_is_no_video_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^clip cannot be read as a video .*; send an MP4, MKV or WEBM"):
        decode_video(data, VideoLimits(), name="clip")


# -- ending it early ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [3, 20, 28], ids=["packets", "frames", "sound"])
def test_a_video_that_nobody_wants_any_more_is_left_where_it_is(calls: int) -> None:
    counted = 0

    def check() -> None:
        nonlocal counted
        counted += 1
        if counted == calls:
            raise Cancelled("the client left")

    data = video_of(numbered(13), tone(16000)[None])
    with pytest.raises(Cancelled):
        decode_video(data, VideoLimits(), 16000, check=check)
    assert counted == calls
