"""What a client receives: the responses of one request, streamed event by event or gathered into one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np

from tritone import contract as c
from tritone.audio import AudioEncoder, base64_s16, encode_audio, to_s16
from tritone.errors import EngineLost
from tritone.pace import Pace
from tritone.ports import Array
from tritone.request import Request
from tritone.timeline import Timeline

FILE_FORMATS = ("wav", "flac", "opus")

T = TypeVar("T")

Send = Callable[[Mapping[str, Array], bool], None]  # output tensors by name, and whether they are the last


class Answer:
    """Builds the responses of one request; `send` takes each of them, the `done` one with final=True.

    Compressing sound takes long, so that runs on `encoders` and not on the event loop.
    """

    def __init__(
        self,
        request: Request,
        sample_rate_hz: int | None,
        send: Send,
        encoders: Executor | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._request = request
        self._send = send
        self._encoders = encoders
        self._rate_hz = sample_rate_hz or 0
        self._timeline = timeline or Timeline()
        self.pace = Pace(self._timeline.received_s)
        self._index = 0
        self._offset = 0  # samples sent
        self._texts: list[str] = []
        self._text_tokens: list[int] = []
        self.num_text_tokens = 0  # behind the text that went out
        self._sounds: list[Array] = []  # float32, kept only for a whole answer
        self.finish_reasons: dict[str, str] = {}
        self._said = ""  # text that was sent
        self._deltas: list[str] = []  # text that is still to be sent, all in one response
        self._delta_tokens = 0  # behind it
        self._again_text, self._again_samples = "", 0  # what is made again and was sent before
        self._unsent: list[bytes] = []  # encoded, of the streamed file
        self._makes_file = request.audio_format in FILE_FORMATS and "audio" in request.modalities
        streams_file = self._makes_file and request.stream
        self._encoder = AudioEncoder(request.audio_format, self._rate_hz) if streams_file else None

    @property
    def is_empty(self) -> bool:
        return not self.pace.first_s

    @property
    def ahead_s(self) -> float:
        """How much more sound was streamed than time has passed since its first packet."""
        if not self._request.stream or "audio" not in self.pace.first_s:
            return 0.0
        return self.audio_s - (self.pace.now_s - self.pace.first_s["audio"])

    @property
    def firsts(self) -> dict[str, float]:
        """`ttft_s` and `ttfp_s`, as far as there was a text and a sound: since the request was received."""
        names = {"text": "ttft_s", "audio": "ttfp_s"}
        return {names[kind]: at_s for kind, at_s in self.pace.first_s.items()}

    @property
    def audio_s(self) -> float:
        return self._offset / self._rate_hz if self._rate_hz else 0.0

    def rewind(self) -> None:
        """The stages begin again from the same seed: what they say is new only from where it was on."""
        self._texts.clear()
        self._text_tokens.clear()
        self._deltas.clear()
        self._delta_tokens = 0
        self.num_text_tokens = self.num_text_tokens if self._request.stream else 0
        self._sounds.clear()
        if self._request.stream:
            self._again_text, self._again_samples = self._said, self._offset
        else:
            self._offset = 0

    def text(self, delta: str, num_tokens: int = 0) -> None:
        """A text delta: whole characters. It goes out with the next `flush`, or before sound or the end does.

        Raises EngineLost when what is made again differs from what was sent.
        """
        known = self._again_text[: len(delta)]
        if not delta.startswith(known):
            raise EngineLost("the text came out differently after the engine's restart", "ask again")
        self._again_text, delta = self._again_text[len(known) :], delta[len(known) :]
        if known and not delta:
            return
        if self._request.stream:
            self._deltas.append(delta)
            self._delta_tokens += num_tokens
            return
        self.pace.note("text")
        self.num_text_tokens += num_tokens
        self._texts.append(delta)
        self._text_tokens.append(num_tokens)

    def flush(self) -> None:
        """Send the text that has come: a response costs the same for one token and for several."""
        if not self._deltas:
            return
        delta, num_tokens = "".join(self._deltas), self._delta_tokens
        self._deltas.clear()
        self._delta_tokens = 0
        self.pace.note("text")
        self.num_text_tokens += num_tokens
        self._said += delta
        tensors = {"text_output": c.TEXT_OUTPUT.pack(delta)}
        if self._request.return_num_output_tokens:
            tensors["num_output_tokens"] = c.NUM_OUTPUT_TOKENS.pack([num_tokens])
        self._event("text", tensors)

    async def audio(self, samples: Array) -> None:
        """Mono float32 [n] in [-1, 1], the next of the answer; one call at a time."""
        known = min(len(samples), self._again_samples)
        self._again_samples -= known
        samples = samples[known:]
        if not len(samples):
            return
        self.flush()
        self.pace.note("audio")
        offset, self._offset = self._offset, self._offset + len(samples)
        if not self._request.stream:
            self._sounds.append(samples)
            return
        if self._encoder is not None:
            await self._off_loop(self._encode, samples)
            self._event("audio", self._encoded(self._unsent_bytes(), offset))
        else:
            self._event("audio", self._sound(samples, offset))

    async def done(
        self,
        stage_usage: Mapping[str, Mapping[str, Any]],
        writer: str | None = None,
        trace_id: str = "",
    ) -> None:
        """The last response: finish reasons, usage, seed and, if asked for, timings.

        stage_usage: what each stage that has ended counted. writer: the stage whose tokens are the text's.
        trace_id: of the request's spans, "" if none are recorded.
        """
        self.flush()
        usage = {**_summary(stage_usage, writer), "audio_s": round(self.audio_s, 6), "stages": stage_usage}
        info: dict[str, Any] = {"usage": usage, "seed": self._request.seed}
        if trace_id:
            info["trace_id"] = trace_id
        if self._request.return_timings:
            info["timings"] = self._timeline.as_dict(self.firsts, time.monotonic())
        tensors = {
            "finish_reason": c.FINISH_REASON.pack(json.dumps(self.finish_reasons)),
            "info": c.INFO.pack(json.dumps(info, ensure_ascii=False)),
        }
        if self._request.return_num_input_tokens:
            tensors["num_input_tokens"] = c.NUM_INPUT_TOKENS.pack(usage.get("prompt_tokens", 0))
        if not self._request.stream:
            tensors["text_output"] = c.TEXT_OUTPUT.pack("".join(self._texts))
            if self._request.return_num_output_tokens:
                tensors["num_output_tokens"] = c.NUM_OUTPUT_TOKENS.pack([sum(self._text_tokens)])
            if "audio" in self._request.modalities:
                samples = np.concatenate([np.zeros(0, np.float32), *self._sounds])
                tensors.update(await self._off_loop(self._sound, samples, 0))
        elif self._encoder is not None:
            await self._off_loop(self._encode, None)
            tail = self._unsent_bytes()
            if tail:
                tensors.update(self._encoded(tail, self._offset))
        self._event("done", tensors, final=True)

    async def _off_loop(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments)`, on a thread if it takes long."""
        if not self._makes_file:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work, *arguments)

    def _event(self, event: str, tensors: dict[str, Array], final: bool = False) -> None:
        tensors.setdefault("text_output", c.TEXT_OUTPUT.pack(""))
        tensors["event"] = c.EVENT.pack(event)
        tensors["index"] = c.INDEX.pack(self._index)
        self._index += 1
        self._send(tensors, final)

    def _encode(self, samples: Array | None) -> None:
        """The next samples of the file, or its end. What comes out is kept: a deadline may fall meanwhile."""
        assert self._encoder is not None
        self._unsent.append(self._encoder.finish() if samples is None else self._encoder.push(samples))

    def _unsent_bytes(self) -> bytes:
        data = b"".join(self._unsent)
        self._unsent.clear()
        return data

    def _sound(self, samples: Array, offset: int) -> dict[str, Array]:
        """Samples complete in themselves: raw, or a whole file."""
        match self._request.audio_format:
            case "s16":
                return {"audio_output": c.AUDIO_OUTPUT.pack(to_s16(samples)), **self._place(offset)}
            case "f32":
                return {"audio_f32": c.AUDIO_F32.pack(samples), **self._place(offset)}
            case "s16_base64":
                return self._encoded(base64_s16(samples), offset)
        return self._encoded(encode_audio(samples, self._rate_hz, self._request.audio_format), offset)

    def _encoded(self, data: str | bytes, offset: int) -> dict[str, Array]:
        return {"audio_encoded": c.AUDIO_ENCODED.pack(data), **self._place(offset)}

    def _place(self, offset: int) -> dict[str, Array]:
        return {
            "sample_rate": c.SAMPLE_RATE.pack(self._rate_hz),
            "sample_offset": c.SAMPLE_OFFSET.pack(offset),
        }


def _summary(stage_usage: Mapping[str, Mapping[str, Any]], writer: str | None) -> dict[str, Any]:
    """The counts that stand for the whole answer: of the tokens of several stages, those of the text."""
    written = stage_usage.get(writer or "", {})
    summary = {key: written[key] for key in ("prompt_tokens", "completion_tokens") if key in written}
    for usage in stage_usage.values():
        if "codec_frames" in usage:
            summary["codec_frames"] = usage["codec_frames"]
    return summary
