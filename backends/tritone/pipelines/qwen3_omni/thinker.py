"""Qwen3-Omni's Thinker: reads, hears and sees a conversation, writes the answer, and tells the talker of it.

    messages, media ─► PromptReader (on a thread, if there are media) ─► slot ─► a token a step ─► text
                           └─ prompt_ids, prompt_positions ─► talker ◄─ media_rows, token_ids ─┘

The talker is told the user's turns when the session starts, the hidden states behind media tokens when the
prompt is read, and each token of the answer as soon as its text is certain. As in the reference, the last
token drawn (the end of turn, or what the limit or a stop string cut off) is not spoken.
"""

from __future__ import annotations

import json
import logging
import queue
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from tritone.engines.base import Delta, Placement, Value, Values
from tritone.engines.memory import Ground, LoadFormat, Term
from tritone.engines.slot_engine import SlotOptions
from tritone.engines.text_engine import TextEngine, TextSession
from tritone.engines.torch_setup import prepared_torch
from tritone.errors import InvalidRequest, TritoneError
from tritone.pipelines.qwen3_omni.attachments import Attachments, decode
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.pipelines.qwen3_omni.memory import thinker_terms
from tritone.ports import Array
from tritone.vision import VideoLimits

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.networks.decoder import Span
    from tritone.pipelines.qwen3_omni.prompt import Prompt

log = logging.getLogger("tritone.engine")


@dataclass(frozen=True)
class ThinkerOptions(SlotOptions):
    load_format: LoadFormat = "auto"  # dummy: random weights in the shapes of config.json, to measure with
    system_prompt: str = ""  # for conversations without a system message
    prefix_cache: bool = True  # start a prompt from what a slot remembers of one with the same beginning
    video_fps: Annotated[float, Meta(gt=0)] = 2.0  # frames that are looked at a second
    max_video_frames: Annotated[int, Meta(ge=4)] = 768
    max_video_pixels: Annotated[int, Meta(ge=1)] = 256_000_000  # of all such frames of a request together

    @property
    def video(self) -> VideoLimits:
        return VideoLimits(
            frames_per_second=self.video_fps,
            max_frames=self.max_video_frames,
            max_pixels=self.max_video_pixels,
        )


@dataclass(eq=False, kw_only=True)
class _Session(TextSession):
    speaks: bool
    prompt: Prompt | None = None  # None until it is read
    reading: Future[None] | None = None  # the work on the media of the prompt
    unwanted: bool = False  # aborted: the media thread may spare itself what is left of that work
    heard_rows: list[Array] = field(default_factory=list)  # float32 [m, H], behind media tokens, in order
    text_shown: int = 0  # characters that went out
    unspoken: deque[tuple[int, int]] = field(default_factory=deque)  # tokens, and where the text of each ends


class Thinker(TextEngine[_Session]):
    """inputs: `messages` (JSON; content is a list of parts), `image`, `audio`, `video` (encoded files in
    order), or `audio_input` float32 [n] with `audio_input_rate`.
    outputs: `text` and `num_tokens`; for the talker `prompt_ids` int32 [U], `prompt_positions` float32
    [3, U + 9] if they differ from each row's place, `media_rows` float32 [M, H], `token_ids` int32 [t].
    settings: `sampling`; `speaks`, there is a talker; `use_audio_in_video`; `limits` of attachments.
    """

    Options = ThinkerOptions

    def __init__(self, placement: Placement, options: ThinkerOptions) -> None:
        torch = prepared_torch(placement)
        from tritone.pipelines.qwen3_omni.processor import load_processor

        processor = load_processor(placement.checkpoint)
        from tritone.engines.text import ChatTokenizer
        from tritone.networks.decoder import Decoder, DecoderConfig
        from tritone.pipelines.qwen3_omni.checkpoint_weights import open_weights
        from tritone.pipelines.qwen3_omni.positions import positions_of
        from tritone.pipelines.qwen3_omni.prompt import PromptReader
        from tritone.pipelines.qwen3_omni.towers import Towers

        config = OmniConfig.read(placement.checkpoint)
        shape = DecoderConfig.from_hf(config.thinker["text_config"], family="qwen3_moe")
        options.check_context(shape.max_positions)
        dtype = getattr(torch, options.dtype)
        weights = open_weights(placement, options.load_format, dtype)
        decoder = Decoder(
            shape,
            weights,
            slots=options.max_slots,
            context_tokens=options.max_context_tokens,
            device=placement.device,
            dtype=dtype,
            prefix="thinker.model.",
            head="thinker.lm_head.weight",
        )
        tokenizer = ChatTokenizer(placement.checkpoint, processor.tokenizer.backend_tokenizer)
        super().__init__(options, decoder, tokenizer, options.prefix_cache)
        self._torch = torch
        self._positions_of = positions_of
        self._options = options
        self._config = config
        towers = Towers(config.thinker, weights, placement.device, dtype)
        self._reader = PromptReader(config, tokenizer, processor, towers, options.max_context_tokens)
        self._media_thread = ThreadPoolExecutor(1, "media")
        self._read_prompts: queue.SimpleQueue[tuple[_Session, Prompt | TritoneError]] = queue.SimpleQueue()
        self._greet({"messages": '[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]'})

    @classmethod
    def memory(cls, ground: Ground, options: ThinkerOptions) -> list[Term]:
        return thinker_terms(ground, options)

    # -- the interface --------------------------------------------------------------------------------------

    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        self._check_room(session)
        messages = self._messages(inputs.get("messages"))
        new = _Session(id=session, speaks=bool(settings.get("speaks")), **self._writing(settings))
        if any(part["type"] != "text" for message in messages for part in message["content"]):
            read = partial(self._read_media, new, messages, dict(inputs), dict(settings))
            new.reading = self._media_thread.submit(read)
        else:
            self._take_prompt(new, self._reader.read(messages, Attachments(), new.speaks))
        self._sessions[session] = new

    def push(self, session: str, inputs: Values, last: bool) -> None:
        """A request comes whole: nothing can follow."""

    def step(self) -> list[Delta]:
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
        session: _Session,
        messages: list[dict[str, Any]],
        inputs: Values,
        settings: Mapping[str, Any],
    ) -> None:
        """On the media thread: decoding and the towers take long, and other sessions go on meanwhile."""
        result: Prompt | TritoneError
        try:
            attached = decode(inputs, settings, self._reader.rate_hz, self._options.video)
            if session.unwanted:
                return
            result = self._reader.read(messages, attached, session.speaks)
        except TritoneError as error:
            result = error
        except Exception as error:
            log.exception("the media of session %s cannot be read", session.id)
            result = TritoneError(f"the media of the request cannot be read: {error}", "see the server log")
        self._read_prompts.put((session, result))
        self.wake()

    def _take_prompt(self, session: _Session, prompt: Prompt) -> None:
        session.prompt = prompt
        keys = list(prompt.keys) if prompt.keys is not prompt.tokens else None
        self._ready(session, prompt.tokens, keys)

    def _reusable(self, session: _Session) -> int:
        """A talker needs the hidden states behind media, which a slot does not remember."""
        prompt = self._prompt_of(session)
        if prompt.media is None or not session.speaks:
            return len(session.keys)
        return int(prompt.media.index[0])

    def _begun(self, session: _Session) -> list[Delta]:
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

    def _prompt_of(self, session: _Session) -> Prompt:
        assert session.prompt is not None
        return session.prompt

    # -- a forward pass -------------------------------------------------------------------------------------

    def _pass(self, sessions: Sequence[_Session], spans: Sequence[Span]) -> Tensor:
        parts = [self._rows(session, span) for session, span in zip(sessions, spans, strict=True)]
        additions: list[tuple[list[Tensor], list[Tensor]]] = []  # by layer: rows, and what is added to them
        tapped: list[tuple[_Session, Tensor]] = []  # whose hidden states are wanted, and at which rows
        first = 0
        for session, span, rows in zip(sessions, spans, parts, strict=True):
            media = self._prompt_of(session).media
            if media is not None and span.start <= media.index[-1]:
                low, high = np.searchsorted(media.index, (span.start, span.end))
                places = self._torch.from_numpy(media.index[low:high] - span.start).to(rows.device)
                rows[places] = media.values[low:high].to(rows.dtype)
                if session.speaks and high > low:
                    tapped.append((session, first + places))
                low, high = np.searchsorted(media.visual_index, (span.start, span.end))
                if high > low:
                    places = self._torch.from_numpy(media.visual_index[low:high] - span.start).to(rows.device)
                    for layer, values in enumerate(media.layers):
                        if layer == len(additions):
                            additions.append(([], []))
                        additions[layer][0].append(first + places)
                        additions[layer][1].append(values[low:high].to(rows.dtype))
            first += span.count
        passed = self._decoder.forward(
            self._joined(parts),
            spans,
            positions=self._positions_of([self._prompt_of(session).positions for session in sessions], spans),
            additions=[(self._torch.cat(rows), self._torch.cat(values)) for rows, values in additions],
            tap=self._config.accept_hidden_layer if tapped else None,
        )
        for session, places in tapped:
            assert passed.tapped is not None
            session.heard_rows.append(passed.tapped[places].float().cpu().numpy())
        return passed.hidden

    def _rows(self, session: _Session, span: Span) -> Tensor:
        return super()._rows(session, span).clone()

    # -- what ends an answer, and what the talker is told of it ---------------------------------------------

    @property
    def _eos_ids(self) -> frozenset[int]:
        """The end of a turn too, as in the reference: generation_config.json need not list it."""
        return super()._eos_ids | {self._config.tokens.im_end}

    def _extras(self, session: _Session, token: int, text: str, finished: bool) -> dict[str, Value]:
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
