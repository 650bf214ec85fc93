"""The media of a request, decoded and checked, as arrays in the order of the conversation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tritone.audio import AudioLimits, Samples, check_samples, decode_audio, resample
from tritone.engines.base import Values
from tritone.media import Check, wanted
from tritone.vision import Pixels, Video, VideoLimits, decode_image, decode_video


@dataclass(frozen=True)
class Attachments:
    """Pictures, recordings and videos of one request."""

    images: Sequence[Pixels] = ()
    audios: Sequence[Samples] = ()  # mono, at the rate of the model
    videos: Sequence[Video] = ()  # with their sound at that rate, if it is to be heard

    def __bool__(self) -> bool:
        return bool(self.images or self.audios or self.videos)

    @property
    def with_sound(self) -> bool:
        """The sound of videos is heard along with them."""
        return any(video.samples is not None for video in self.videos)

    def heard(self, messages: Sequence[Mapping[str, Any]]) -> list[Samples]:
        """Everything that is heard, in the order in which the conversation refers to it."""
        audios, videos = iter(self.audios), iter(self.videos)
        sounds: list[Samples] = []
        for message in messages:
            for part in message["content"]:
                if part["type"] == "audio":
                    sounds.append(next(audios))
                elif part["type"] == "video" and self.with_sound:
                    samples = next(videos).samples
                    assert samples is not None
                    sounds.append(samples)
        return sounds


def decode(
    inputs: Values,
    settings: Mapping[str, Any],
    rate_hz: int,
    video: VideoLimits,
    check: Check = wanted,
) -> Attachments:
    """The attachments among the `inputs` of a request.

    settings: `limits` (image_pixels, audio_s, video_s) and `use_audio_in_video`.
    rate_hz: of what the model hears.
    check: called between the parts of the work.
    Raises InvalidRequest naming the attachment that cannot be used, and what `check` raises.
    """
    limits = settings.get("limits", {})
    sound_hz = rate_hz if settings.get("use_audio_in_video") else 0
    video = replace(video, max_seconds=float(limits.get("video_s", video.max_seconds)))
    pixels = int(limits.get("image_pixels", 1 << 26))
    return Attachments(
        images=_images(inputs, pixels, check),
        audios=_recordings(inputs, float(limits.get("audio_s", AudioLimits.max_seconds)), rate_hz, check),
        videos=_videos(inputs, video, sound_hz, check),
    )


def _images(inputs: Values, max_pixels: int, check: Check) -> list[Pixels]:
    images: list[Pixels] = []
    for file, name in _files(inputs, "image"):
        check()
        images.append(decode_image(file, max_pixels, name))
    return images


def _recordings(inputs: Values, max_seconds: float, rate_hz: int, check: Check) -> list[Samples]:
    """Recordings at `rate_hz`, no longer than `max_seconds` together."""
    sounds: list[tuple[Samples, int]] = []
    left_s = max_seconds
    if "audio_input" in inputs:
        sounds.append(
            check_samples(
                inputs["audio_input"], inputs.get("audio_input_rate"), AudioLimits(max_seconds=left_s)
            )
        )
    for file, name in _files(inputs, "audio"):
        samples, from_hz = decode_audio(file, AudioLimits(max_seconds=left_s), name, check)
        left_s -= len(samples) / from_hz
        sounds.append((samples, from_hz))
    return [resample(samples, from_hz, rate_hz) for samples, from_hz in sounds]


def _videos(inputs: Values, limits: VideoLimits, sound_hz: int, check: Check) -> list[Video]:
    """Videos whose frames have no more than `limits.max_pixels` together: all are in memory at a time."""
    videos: list[Video] = []
    left = limits.max_pixels
    for file, name in _files(inputs, "video"):
        videos.append(decode_video(file, replace(limits, max_pixels=left), sound_hz, name, check))
        left -= math.prod(videos[-1].frames.shape[:3])
    return videos


def _files(inputs: Values, kind: str) -> list[tuple[bytes, str]]:
    """Encoded files of a kind, each with its name in errors."""
    files = inputs.get(kind)
    given = list(files) if isinstance(files, list | tuple) else []
    return [(bytes(file), f"{kind}[{i}]" if len(given) > 1 else kind) for i, file in enumerate(given)]
