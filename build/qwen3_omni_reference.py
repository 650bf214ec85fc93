"""What the reference implementation answers to named requests, and how clear each of its choices is.

    Case ─► encoded media, messages ─► processor ─► generate(return_audio=True), greedy ─► Answer
                                                        │ every argmax, every choice of experts
                                                        └──────────────────────────────────► Margins

A case is in the form that a client sends, and its files decode to exactly what the reference is given:
PNG, 16-bit WAV, and FFV1 with 16-bit PCM in Matroska. Reference: `Qwen3OmniMoeForConditionalGeneration` in
`transformers`, float32, one thread.

    python build/qwen3_omni_reference.py DIR      print the answers of the checkpoint in DIR and their margins
"""

from __future__ import annotations

import io
import sys
import warnings
import wave
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritone.pipelines.qwen3_omni.processor import import_transformers, load_processor

AUDIO_RATE_HZ = 16000
VIDEO_FPS = 2.0  # frames are taken from a video at this rate
MIN_FRAMES, MAX_FRAMES = 4, 768
CLEAR = 5e-4  # a hundred times the noise: logits in float32 differ from those in float64 by up to 6e-6

IMAGE, AUDIO, VIDEO = {"type": "image"}, {"type": "audio"}, {"type": "video"}  # parts of a message

Frames = npt.NDArray[np.uint8]  # [n, height, width, 3], RGB
Sound = npt.NDArray[np.int16]  # [n], mono at AUDIO_RATE_HZ


@dataclass(frozen=True)
class Video:
    """What a video file holds."""

    frames: Frames
    fps: int
    sound: Sound | None = None


@dataclass(frozen=True)
class Case:
    """One request, and how its answer ends."""

    name: str
    messages: tuple[dict[str, Any], ...]  # content: a string, or parts {"type": ...} as a client sends them
    images: tuple[Frames, ...] = ()  # each [height, width, 3]
    audios: tuple[Sound, ...] = ()
    videos: tuple[Video, ...] = ()
    use_audio_in_video: bool = False
    speaker: str = "ethan"
    thinker_max_tokens: int = 12
    talker_max_tokens: int = 17  # the last one is never heard: 16 frames
    talker_repetition_penalty: float = 1.0
    thinker_finish: str | None = None  # stop or length, where the name of the case promises it
    talker_finish: str | None = None

    @property
    def image_files(self) -> list[bytes]:
        return [png(image) for image in self.images]

    @property
    def audio_files(self) -> list[bytes]:
        return [wav(audio) for audio in self.audios]

    @property
    def video_files(self) -> list[bytes]:
        return [matroska(video) for video in self.videos]


@dataclass(frozen=True)
class Margins:
    """The smallest lead of what was chosen over what was not, as a difference of logits."""

    thinker: float
    talker: float
    residual: float  # of the heads of the other codebooks
    routing: float  # last chosen expert over the first not chosen

    @property
    def least(self) -> float:
        return min(self.thinker, self.talker, self.residual, self.routing)


@dataclass(frozen=True)
class Answer:
    """What the reference gave."""

    prompt_ids: npt.NDArray[np.int64]  # [P]
    text_ids: npt.NDArray[np.int64]  # [n], with the token that ended the text if one did
    codes: npt.NDArray[np.int64]  # [codebooks, T]
    waveform: npt.NDArray[np.float32]  # [samples], 24 kHz mono
    text: str  # text_ids without special tokens
    thinker_finish: str  # stop or length
    talker_finish: str
    margins: Margins


def cases() -> dict[str, Case]:
    """The requests by name; the same bytes on every machine.

    Words and seeds were chosen with the weights so that every choice on the way to the answers is clear.
    """
    picture, wide = noise(1, (80, 72, 3)), noise(3, (64, 130, 3))
    tone, sweep = sound(2.0, 440, 440), sound(1.3, 300, 900)
    clip = Video(noise(6, (12, 48, 64, 3)), fps=8)  # 1.5 s: fewer than MIN_FRAMES at VIDEO_FPS
    film = Video(noise(3, (10, 48, 64, 3)), fps=5, sound=sound(2.0, 200, 500))
    weather = turn("user", "Tell me about the weather today.")
    conversation = (
        turn("system", "You are a good voice."),
        turn("user", IMAGE, "What is it?"),
        turn("assistant", "It is a red cat."),
        turn("user", "What is in the picture?"),
    )
    listed = (
        Case("text", (weather,)),
        Case("penalty", (weather,), talker_repetition_penalty=1.05),
        Case(
            "stops",
            (weather,),
            thinker_max_tokens=40,
            talker_max_tokens=61,
            thinker_finish="stop",
            talker_finish="stop",
        ),
        Case("cut", (turn("user", "How are you today?"),), thinker_max_tokens=24, thinker_finish="length"),
        Case(
            "long",
            (turn("user", "Why is the sky blue?"),),
            talker_max_tokens=48,
            thinker_finish="stop",
            talker_finish="length",
        ),
        Case("audio", (turn("user", AUDIO, "What do you hear?"),), audios=(tone,)),
        Case("image", (turn("user", IMAGE, "Tell me about this."),), images=(picture,)),
        Case(
            "image_audio",
            (turn("user", IMAGE, AUDIO, "What is in the picture?"),),
            images=(picture,),
            audios=(tone,),
        ),
        Case("video", (turn("user", VIDEO, "What do you see?"),), videos=(clip,), talker_max_tokens=9),
        Case(
            "video_audio",
            (turn("user", VIDEO, "What do you see and hear?"),),
            videos=(film,),
            use_audio_in_video=True,
            talker_max_tokens=9,
        ),
        Case("turns", conversation, images=(wide,), speaker="chelsie"),
        Case(
            "two_audios",
            (turn("user", AUDIO, "and", AUDIO, "Which one is long?"),),
            audios=(sweep, tone),
            speaker="aiden",
        ),
    )
    return {case.name: case for case in listed}


def turn(role: str, *parts: str | dict[str, str]) -> dict[str, Any]:
    """A message; a string is a text part."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content}


def noise(seed: int, shape: tuple[int, ...]) -> Frames:
    """Every value at random, so that an error of one row or column of patches is seen."""
    bits = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    return (bits >> np.uint64(56)).astype(np.uint8).reshape(shape)


def sound(seconds: float, from_hz: float, to_hz: float) -> Sound:
    """A sweep of a triangle wave, in whole-number arithmetic: the same on every machine."""
    count = int(seconds * AUDIO_RATE_HZ)
    steps = np.linspace(from_hz, to_hz, count).astype(np.int64) * (1 << 16) // AUDIO_RATE_HZ
    phase = np.cumsum(steps) & 0xFFFF
    return (np.abs(phase - 0x8000) // 2 - 0x2000).astype(np.int16)


def png(image: Frames) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def wav(samples: Sound) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(AUDIO_RATE_HZ)
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def matroska(video: Video) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        pictures = container.add_stream("ffv1", rate=video.fps)
        pictures.height, pictures.width = video.frames.shape[1:3]
        pictures.pix_fmt = "bgr0"
        if video.sound is not None:
            track = container.add_stream("pcm_s16le", rate=AUDIO_RATE_HZ, layout="mono")
            heard = av.AudioFrame.from_ndarray(video.sound[None], format="s16", layout="mono")
            heard.sample_rate, heard.pts = AUDIO_RATE_HZ, 0
            heard.time_base = Fraction(1, AUDIO_RATE_HZ)
            container.mux([*track.encode(heard), *track.encode()])
        for place, frame in enumerate(video.frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = place, Fraction(1, video.fps)
            container.mux(pictures.encode(picture))
        container.mux(pictures.encode())
    return file.getvalue()


def sampled(video: Video) -> tuple[Frames, float]:
    """The frames that the model sees, evenly spread over the video, and their real rate in Hz."""
    total = len(video.frames)
    seconds = total / video.fps
    count = min(max(2 * round(seconds * VIDEO_FPS / 2), MIN_FRAMES), MAX_FRAMES, total // 2 * 2)
    return video.frames[np.linspace(0, total - 1, count).round().astype(int)], count / seconds


def model_inputs(processor: Any, case: Case) -> dict[str, Any]:
    """Keyword arguments of `generate` that hold the prompt."""
    text = processor.apply_chat_template(list(case.messages), tokenize=False, add_generation_prompt=True)
    heard = list(case.audios)
    arguments: dict[str, Any] = {}
    if case.videos:
        seen = [sampled(video) for video in case.videos]
        arguments["videos"] = [frames for frames, _ in seen]
        arguments["fps"] = seen[0][1]
        arguments["do_sample_frames"] = False
        if case.use_audio_in_video:
            arguments["use_audio_in_video"] = True
            heard += [video.sound for video in case.videos if video.sound is not None]
    if case.images:
        arguments["images"] = list(case.images)
    if heard:
        arguments["audio"] = [samples.astype(np.float32) / 32768 for samples in heard]
    return dict(processor(text=text, return_tensors="pt", padding=True, **arguments))


class Reference:
    """The model of a checkpoint folder, asked one case at a time."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        import torch

        transformers = import_transformers()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch = torch
        self._dtype = getattr(torch, dtype)
        self.processor = load_processor(folder)
        self.model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            folder, dtype=self._dtype, experts_implementation="eager", local_files_only=True
        ).eval()
        # The reference reads this where pictures and sound come together, and its config class lacks it.
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config
        self.ends = list(self.model.generation_config.eos_token_id)
        self.codec_end = self.model.config.talker_config.codec_eos_token_id

    def answer(self, case: Case) -> Answer:
        watch = Watch(self.model)
        inputs = model_inputs(self.processor, case)
        floats = {
            name: value.to(self._dtype)
            for name, value in inputs.items()
            if name in ("input_features", "pixel_values", "pixel_values_videos")
        }
        threads = self._torch.get_num_threads()
        self._torch.set_num_threads(1)
        try:
            with self._torch.no_grad(), watch, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the talker's penalty is meant to count its own tokens only
                sequence, waveform = self.model.generate(
                    **inputs | floats,
                    return_audio=True,
                    speaker=case.speaker,
                    use_audio_in_video=case.use_audio_in_video,
                    thinker_max_new_tokens=case.thinker_max_tokens,
                    thinker_eos_token_id=self.ends,
                    thinker_do_sample=False,
                    thinker_logits_processor=[watch.thinker],
                    talker_max_new_tokens=case.talker_max_tokens,
                    talker_do_sample=False,
                    talker_repetition_penalty=case.talker_repetition_penalty,
                    talker_logits_processor=[watch.talker],
                )
        finally:
            self._torch.set_num_threads(threads)
        prompt = inputs["input_ids"][0]
        text_ids = sequence[0, len(prompt) :]
        return Answer(
            prompt_ids=prompt.numpy(),
            text_ids=text_ids.numpy(),
            codes=watch.codes[0].numpy(),
            waveform=waveform.reshape(-1).numpy(),
            text=self.processor.tokenizer.decode(text_ids, skip_special_tokens=True),
            thinker_finish="stop" if int(text_ids[-1]) in self.ends else "length",
            talker_finish="stop" if watch.talker.last == self.codec_end else "length",
            margins=watch.margins(),
        )


class Lead:
    """Notes every argmax that it is shown; the last of a list of logits processors."""

    def __init__(self) -> None:
        self.least = float("inf")
        self.last = -1

    def __call__(self, _: Any, scores: Any) -> Any:
        best = scores[0].topk(2)
        self.least = min(self.least, float(best.values[0] - best.values[1]))
        self.last = int(best.indices[0])
        return scores


class Watch:
    """Looks on while the reference answers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self.thinker, self.talker, self._residual = Lead(), Lead(), Lead()
        self._routing = float("inf")
        self.codes: Any = None  # int64 [1, codebooks, T]

    def margins(self) -> Margins:
        return Margins(self.thinker.least, self.talker.least, self._residual.least, self._routing)

    def __enter__(self) -> None:
        for head in self._model.talker.code_predictor.lm_head:
            self._hooks.append(head.register_forward_hook(self._residual_choice))
        for module in self._model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                self._hooks.append(module.register_forward_hook(self._route))
        self._hooks.append(self._model.code2wav.register_forward_pre_hook(self._decode))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _residual_choice(self, _: Any, __: Any, logits: Any) -> None:
        self._residual(None, logits[:, -1])

    def _route(self, router: Any, _: Any, output: Any) -> None:
        best = output[0].topk(router.top_k + 1, dim=-1).values
        self._routing = min(self._routing, float((best[:, -2] - best[:, -1]).min()))

    def _decode(self, _: Any, arguments: tuple[Any, ...]) -> None:
        assert self.codes is None, "a case is decoded in one piece"
        self.codes = arguments[0]


def answers(folder: Path) -> dict[str, Answer]:
    """The answer of the checkpoint in `folder` to every case."""
    reference = Reference(folder)
    return {name: reference.answer(case) for name, case in cases().items()}


def problems(folder: Path) -> list[str]:
    """What makes the checkpoint unfit to be held to the reference: nothing, if it is fit."""
    found = []
    for name, answer in answers(folder).items():
        case = cases()[name]
        if answer.margins.least < CLEAR:
            found.append(f"case '{name}' has a choice by only {answer.margins.least:.1e}")
        for stage in ("thinker", "talker"):
            wanted, given = getattr(case, f"{stage}_finish"), getattr(answer, f"{stage}_finish")
            if wanted not in (None, given):
                found.append(f"case '{name}': the {stage} ends with '{given}', not '{wanted}'")
        if not 0 < float(np.abs(answer.waveform).max()) < 1:
            found.append(f"case '{name}' is silent or clipped")
    return found


def main(argv: list[str] | None = None) -> int:
    folder = Path((sys.argv[1:] if argv is None else argv)[0])
    for name, answer in answers(folder).items():
        margins = " ".join(f"{key} {value:.1e}" for key, value in vars(answer.margins).items())
        print(f"{name}: {answer.text!r}")
        print(f"  {len(answer.prompt_ids)} prompt tokens, {len(answer.text_ids)} text tokens", end=" ")
        print(f"({answer.thinker_finish}), {answer.codes.shape[1]} frames ({answer.talker_finish})")
        print(f"  {len(answer.waveform)} samples, deviation {answer.waveform.std():.3f}; least {margins}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
