"""Pictures and videos at the border of a pipeline: encoded files in, RGB arrays out.

Inside, a picture is uint8 [height, width, 3], and a video uint8 [frames, height, width, 3] with its rate in
Hz. Sizes are read from the files' headers and checked before anything is decoded.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tritone.audio import Samples
from tritone.errors import InvalidRequest, TritoneError
from tritone.media import Check, unwrapped, wanted

if TYPE_CHECKING:
    import av.container
    import av.video
    from PIL import Image

Pixels = npt.NDArray[np.uint8]

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# Containers that hold what they show: a playlist or a session description would open other files and sockets.
_CONTAINERS = {"format_whitelist": "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf"}
_FRAME_MULTIPLE = 2  # frames are looked at in pairs


@dataclass(frozen=True)
class VideoLimits:
    """What a video may be, and how densely it is looked at."""

    max_seconds: float = 300.0
    frames_per_second: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    max_pixels: int = 256_000_000  # of all frames that are looked at together


@dataclass(frozen=True)
class Video:
    """The frames of a video that are looked at, evenly spaced, and its sound."""

    frames: Pixels  # uint8 [F, height, width, 3]
    rate_hz: float  # of `frames`
    samples: Samples | None = None  # mono, if it was asked for
    samples_rate_hz: int = 0


def decode_image(data: bytes, max_pixels: int, name: str = "image") -> Pixels:
    """The picture in an encoded file, upright: uint8 [height, width, 3].

    data: a PNG, JPEG, WEBP, BMP, GIF or TIFF file, or base64 text of one. name: the field in errors.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise InvalidRequest(f"{name} is empty", "send a picture")
    try:
        with Image.open(io.BytesIO(unwrapped(data)), formats=IMAGE_FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise InvalidRequest(
                    f"{name} has {width} x {height} pixels", f"send at most {max_pixels} in all"
                )
            return np.array(_of_eight_bits(ImageOps.exif_transpose(image)).convert("RGB"))
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise InvalidRequest(f"{name} is not a picture", f"send {', '.join(IMAGE_FORMATS)}") from None
    except Image.DecompressionBombError:
        raise InvalidRequest(f"{name} has far too many pixels", f"send at most {max_pixels} in all") from None
    except Exception as fault:  # the decoders raise what they like on broken files
        raise InvalidRequest(
            f"{name} cannot be read as a picture ({_line(fault)})", f"send {', '.join(IMAGE_FORMATS)}"
        ) from None


def decode_video(
    data: bytes,
    limits: VideoLimits,
    audio_rate_hz: int = 0,
    name: str = "video",
    check: Check = wanted,
) -> Video:
    """Frames of an encoded video, evenly spaced, and its sound at `audio_rate_hz` if that is not 0.

    data: an MP4, MKV, WEBM … file, or base64 text of one. name: the field in errors.
    """
    import av

    if not data:
        raise InvalidRequest(f"{name} is empty", "send a video")
    data = unwrapped(data)
    try:
        with av.open(io.BytesIO(data), mode="r", options=_CONTAINERS) as container:
            total, rate_hz = _length(container, limits, name, check)
        count = num_frames(total, rate_hz, limits)
        with av.open(io.BytesIO(data), mode="r", options=_CONTAINERS) as container:
            frames = _frames(container, total, count, limits, name, check)
        samples = None
        if audio_rate_hz:
            with av.open(io.BytesIO(data), mode="r", options=_CONTAINERS) as container:
                samples = _sound(container, audio_rate_hz, limits, name, check)
    except TritoneError:
        raise
    except Exception as fault:  # the decoders raise what they like on broken files
        raise InvalidRequest(
            f"{name} cannot be read as a video ({_line(fault)})", "send an MP4, MKV or WEBM file"
        ) from None
    return Video(frames, len(frames) * rate_hz / total, samples, audio_rate_hz)


def num_frames(total: int, rate_hz: float, limits: VideoLimits) -> int:
    """How many of `total` frames at `rate_hz` are looked at: an even number, within the limits."""
    wanted = total / rate_hz * limits.frames_per_second
    count = _FRAME_MULTIPLE * round(wanted / _FRAME_MULTIPLE)
    count = min(max(count, limits.min_frames), limits.max_frames // _FRAME_MULTIPLE * _FRAME_MULTIPLE)
    return max(1, min(count, total // _FRAME_MULTIPLE * _FRAME_MULTIPLE))


def _length(
    container: av.container.InputContainer, limits: VideoLimits, name: str, check: Check
) -> tuple[int, float]:
    """Number of frames and their rate in Hz, from packets alone."""
    if not container.streams.video:
        raise InvalidRequest(f"{name} has no pictures", "send a video, or the sound as audio")
    stream = container.streams.video[0]
    rate_hz = float(stream.average_rate or stream.guessed_rate or 0)
    if not rate_hz:
        raise InvalidRequest(f"{name} does not say its frame rate", "send it in another container")
    total = 0
    for packet in container.demux(stream):
        check()
        total += packet.size > 0
        if total > limits.max_seconds * rate_hz:
            raise InvalidRequest(
                f"{name} is longer than {limits.max_seconds:g} s",
                "send a shorter one, or raise limits.video_s",
            )
    if not total:
        raise InvalidRequest(f"{name} has no frames", "send a video")
    return total, rate_hz


def _frames(
    container: av.container.InputContainer,
    total: int,
    count: int,
    limits: VideoLimits,
    name: str,
    check: Check,
) -> Pixels:
    """`count` of `total` frames, upright and of the size of the first: uint8 [count, height, width, 3]."""
    stream = container.streams.video[0]
    _check_size(stream, count, limits, name)
    wanted = np.linspace(0, total - 1, count).round().astype(int).tolist()
    chosen: list[Pixels] = []
    first: Any = None
    last: Any = None
    for number, frame in enumerate(container.decode(stream)):
        check()
        _check_size(frame, count, limits, name)  # each may have a size of its own, whatever the header says
        first, last = first or frame, frame
        while len(chosen) < count and wanted[len(chosen)] == number:
            chosen.append(_pixels(frame, first))
        if len(chosen) == count:
            break
    if last is None:
        raise InvalidRequest(f"{name} has no frames that can be decoded", "send a video")
    while len(chosen) < count:  # the header promised more than there is
        chosen.append(_pixels(last, first))
    return np.stack(chosen)


def _sound(
    container: av.container.InputContainer, rate_hz: int, limits: VideoLimits, name: str, check: Check
) -> Samples:
    import av

    if not container.streams.audio:
        raise InvalidRequest(f"{name} has no sound", "leave use_audio_in_video out")
    # Channels are mixed here as those of recordings are; the resampler would make them louder.
    resampler = av.AudioResampler(format="fltp", rate=rate_hz)
    pieces: list[Samples] = []
    room = int((limits.max_seconds + 1) * rate_hz)  # a sound track may outlast the pictures a little
    for frame in chain(container.decode(container.streams.audio[0]), (None,)):
        check()
        for piece in resampler.resample(frame):
            pieces.append(piece.to_ndarray().mean(axis=0))
            room -= len(pieces[-1])
        if room < 0:
            raise InvalidRequest(
                f"the sound of {name} is longer than {limits.max_seconds:g} s", "send a shorter video"
            )
    samples: Samples = np.concatenate([np.zeros(0, np.float32), *pieces])
    if not len(samples):
        raise InvalidRequest(f"{name} has no sound", "leave use_audio_in_video out")
    if not np.isfinite(samples).all():
        raise InvalidRequest(f"the sound of {name} holds NaN or infinite samples", "send finite samples")
    return samples


def _of_eight_bits(image: Image.Image) -> Image.Image:
    """Grey values of 16 bits keep their upper half; a conversion to RGB would clip them instead."""
    if not image.mode.startswith("I;16"):
        return image
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _check_size(picture: Any, count: int, limits: VideoLimits, name: str) -> None:
    """InvalidRequest if `count` pictures of this size are too many pixels."""
    if count * picture.width * picture.height > limits.max_pixels:
        raise InvalidRequest(
            f"{name} has {picture.width} x {picture.height} pixels in each of {count} frames",
            f"send at most {limits.max_pixels} pixels in all: a smaller or a shorter video",
        )


def _pixels(frame: Any, first: Any) -> Pixels:
    """A frame as RGB, upright, at the size of the first one."""
    pixels: Pixels = frame.to_ndarray(format="rgb24", width=first.width, height=first.height)
    return np.rot90(pixels, round(first.rotation / 90))


def _line(fault: Exception) -> str:
    """What a decoder says of a file, in a line, and not which object it read from."""
    said = (getattr(fault, "strerror", None) or f"{fault}").strip()
    return said.splitlines()[0][:120] if said else type(fault).__name__
