"""What Qwen3-Omni's Thinker does whatever draws its tokens: reads a request, and tells the talker of it.

    messages, media ─► PromptReader (on a thread, if there are media) ─► an engine ─► tokens ─► text
                           └─ prompt_ids, prompt_positions ─► talker ◄─ media_rows, token_ids ─┘

The talker is told the user's turns when the session starts, the hidden states behind media tokens when the
prompt is read, and each token of the answer as soon as its text is certain. As in the reference, the last
token drawn (the end of turn, or what the limit or a stop string cut off) is not spoken.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from tritone.engines.base import Delta, Value, Values
from tritone.engines.graph_text_engine import GraphTextSession
from tritone.engines.memory import LoadFormat
from tritone.engines.slot_engine import SlotOptions
from tritone.engines.text_writer import TextWriter
from tritone.errors import Cancelled, InvalidRequest, TritoneError
from tritone.pipelines.qwen3_omni.attachments import Attachments, decode
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.ports import Array
from tritone.vision import VideoLimits

if TYPE_CHECKING:
    from tritone.engines.stage_stream import StageStream
    from tritone.engines.text import ChatTokenizer
    from tritone.pipelines.qwen3_omni.prompt import Prompt, PromptReader

log = logging.getLogger("tritone.engine")

MEDIA_THREADS = 2  # files that are decoded at a time: a long video does not hold up the pictures of others
GREETING = {"messages": '[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]'}


@dataclass(frozen=True)
class ThinkingOptions(SlotOptions):
    load_format: LoadFormat = "auto"  # dummy: random weights in the shapes of config.json, to measure with
    system_prompt: str = ""  # for conversations without a system message
    prefix_cache: bool = True  # start a prompt from what the cache remembers of one with the same beginning
    video_fps: Annotated[float, Meta(gt=0)] = 2.0  # frames that are looked at a second
    max_video_frames: Annotated[int, Meta(ge=4)] = 768  # of one video, however long
    max_video_pixels: Annotated[int, Meta(ge=1)] = 256_000_000  # of all such frames of a request together

    @property
    def video(self) -> VideoLimits:
        return VideoLimits(
            frames_per_second=self.video_fps,
            max_frames=self.max_video_frames,
            max_pixels=self.max_video_pixels,
        )


@dataclass(eq=False, kw_only=True)
class ThinkerSession(GraphTextSession):
    speaks: bool
    prompt: Prompt | None = None  # None until it is read
    reading: Future[None] | None = None  # the work on the media of the prompt
    unwanted: bool = False  # aborted: the media threads may spare themselves what is left of that work
    heard_rows: list[Array] = field(default_factory=list)  # float32 [m, H], behind media tokens, in order
    heard: int = 0  # rows that came so far, from an engine that may give some again
    text_shown: int = 0  # characters that went out
    unspoken: deque[tuple[int, int]] = field(default_factory=deque)  # tokens, and where the text of each ends


class Thinking(TextWriter[ThinkerSession]):
    """inputs: `messages` (JSON; content is a list of parts), `image`, `audio`, `video` (encoded files in
    order), or `audio_input` float32 [n] with `audio_input_rate`.
    outputs: `text` and `num_tokens`; for the talker `prompt_ids` int32 [U], `prompt_positions` float32
    [3, U + 9] if they differ from each row's place, `media_rows` float32 [M, H], `token_ids` int32 [t].
    settings: `sampling`; `speaks`, there is a talker; `use_audio_in_video`; `limits` of attachments.
    """

    def _think_with(
        self,
        options: ThinkingOptions,
        config: OmniConfig,
        tokenizer: ChatTokenizer,
        reader: PromptReader,
        stream: StageStream,
    ) -> None:
        """To be called once, before the first session. stream: for all threads of the stage."""
        self._write_with(tokenizer)
        self._options, self._config, self._reader = options, config, reader
        # In the stream of the loop's thread, which goes on with what the towers make: see stage_stream.py.
        self._media_threads = ThreadPoolExecutor(MEDIA_THREADS, "media", stream.enter)
        self._reader_lock = threading.Lock()  # its tokenizer and its towers serve one prompt at a time
        self._read_prompts: queue.SimpleQueue[tuple[ThinkerSession, Prompt | TritoneError]] = (
            queue.SimpleQueue()
        )

    # -- the interface, as far as it is the same for every engine -------------------------------------------

    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        self._check_room(session)
        messages = self._messages(inputs.get("messages"))
        new = ThinkerSession(id=session, speaks=bool(settings.get("speaks")), **self._writing(settings))
        if any(part["type"] != "text" for message in messages for part in message["content"]):
            read = partial(self._read_media, new, messages, dict(inputs), dict(settings))
            new.reading = self._media_threads.submit(read)
        else:
            self._take_prompt(new, self._reader.read(messages, Attachments(), new.speaks))
        self._sessions[session] = new

    def push(self, session: str, inputs: Values, last: bool) -> None:
        """A request comes whole: nothing can follow."""

    def step(self) -> list[Delta]:
        self._take_read_prompts()
        return super().step()

    @property
    def has_work(self) -> bool:
        return not self._read_prompts.empty() or super().has_work

    def abort(self, session: str) -> None:
        known = self._sessions.get(session)
        if known is not None and known.reading is not None:
            known.unwanted = True
            known.reading.cancel()
        super().abort(session)

    def stats(self) -> dict[str, int | float]:
        reading = sum(session.reading is not None for session in self._sessions.values())
        return {**super().stats(), "reading_media": reading}

    def _take_read_prompts(self) -> None:
        """Let sessions whose media have been read wait for their turn, or refuse them."""
        while not self._read_prompts.empty():
            session, prompt = self._read_prompts.get()
            if self._sessions.get(session.id) is not session:
                continue  # it was aborted meanwhile
            session.reading = None
            try:
                if isinstance(prompt, TritoneError):
                    raise prompt
                self._take_prompt(session, prompt)
            except TritoneError as error:
                self._refuse(session.id, error)

    # -- the prompt -----------------------------------------------------------------------------------------

    def _messages(self, text: Any) -> list[dict[str, Any]]:
        if not isinstance(text, str):
            raise InvalidRequest("messages is missing", "send the JSON list of chat messages")
        messages: list[dict[str, Any]] = json.loads(text)
        if self._options.system_prompt and all(message["role"] != "system" for message in messages):
            part = {"type": "text", "text": self._options.system_prompt}
            messages.insert(0, {"role": "system", "content": [part]})
        return messages

    def _read_media(
        self,
        session: ThinkerSession,
        messages: list[dict[str, Any]],
        inputs: Values,
        settings: Mapping[str, Any],
    ) -> None:
        """On a media thread: decoding and the towers take long, and other sessions go on meanwhile."""

        def check() -> None:
            if session.unwanted:
                raise Cancelled("the request was cancelled")

        result: Prompt | TritoneError
        try:
            attached = decode(inputs, settings, self._reader.rate_hz, self._options.video, check)
            with self._reader_lock:
                check()
                result = self._reader.read(messages, attached, session.speaks)
        except Cancelled:
            return
        except TritoneError as error:
            result = error
        except Exception as error:
            log.exception("the media of session %s cannot be read", session.id)
            result = TritoneError(f"the media of the request cannot be read: {error}", "see the server log")
        self._read_prompts.put((session, result))
        self.wake()

    def _take_prompt(self, session: ThinkerSession, prompt: Prompt) -> None:
        session.prompt = prompt
        keys = list(prompt.keys) if prompt.keys is not prompt.tokens else None
        self._ready(session, prompt.tokens, keys)

    def _begun(self, session: ThinkerSession) -> list[Delta]:
        """What the talker is told when a session gets its turn."""
        prompt = self._prompt_of(session)
        if not session.speaks:
            return []
        outputs: dict[str, Value] = {
            "prompt_ids": np.asarray(prompt.spoken_ids, np.int32),
            "token_ids": np.asarray(prompt.head, np.int32),
        }
        if prompt.spoken_positions is not None:
            outputs["prompt_positions"] = np.asarray(prompt.spoken_positions, np.float32)
        return [Delta(session.id, outputs)]

    def _prompt_of(self, session: ThinkerSession) -> Prompt:
        assert session.prompt is not None
        return session.prompt

    # -- what ends an answer, and what the talker is told of it ---------------------------------------------

    @property
    def _eos_ids(self) -> frozenset[int]:
        """The end of a turn too, as in the reference: generation_config.json need not list it."""
        return super()._eos_ids | {self._config.tokens.im_end}

    def _extras(self, session: ThinkerSession, token: int, text: str, finished: bool) -> dict[str, Value]:
        if not session.speaks:
            return {}
        outputs: dict[str, Value] = {}
        if session.heard_rows:
            outputs["media_rows"] = np.concatenate(session.heard_rows)
            session.heard_rows.clear()
        session.text_shown += len(text)
        if not finished:
            # A character that has only begun counts as one that is held back: it may begin a stop string.
            held = session.stops.held + session.detokenizer.has_part
            session.unspoken.append((token, session.text_shown + held))
        spoken = []
        ends_itself = finished and not session.stops.found
        while session.unspoken and (ends_itself or session.unspoken[0][1] <= session.text_shown):
            spoken.append(session.unspoken.popleft()[0])
        if spoken:
            outputs["token_ids"] = np.asarray(spoken, np.int32)
        return outputs
