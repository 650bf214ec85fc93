"""Qwen3-Omni's Talker: the tokens that the thinker draws become codec frames, a frame a step.

    prompt_ids, media_rows ─► the user's turns ─┐
    token_ids ─► head of the assistant's turn ──┴─► rows of the prompt ─► decoder, in pieces
                 └─► the prompt's last row, then text row k ─► Frames ─► frame k

A row is known as soon as what it is made of has come, so the prompt is read while the thinker still reads
its own, and frame k waits for token k + 2 and for nothing else. After the last token come one row "text
ended" and then rows of padding, until the codec's end sign.

A step reads pieces of prompts and makes a frame for every session that has a row for one. Where frames may
overlap (frame.py), a step launches frame k + 1 and tells frame k, whose delivery then costs no time.

Reference: `generate` of Qwen3OmniMoeForConditionalGeneration and Qwen3OmniMoeTalkerForConditionalGeneration,
whose limit it shares: the token at `max_tokens` gets no frame.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta

from tritone.engines.base import DECODE, Delta, Placement, Values
from tritone.engines.memory import Ground, LoadFormat, Term
from tritone.engines.slot_engine import SlotEngine, SlotOptions, SlotSession
from tritone.engines.text_writer import sampling_of
from tritone.engines.torch_setup import prepared_torch
from tritone.errors import InvalidRequest, TritoneError, not_numbers
from tritone.pipelines.qwen3_omni import check_speaker
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.pipelines.qwen3_omni.frame_row import NOT_A_NUMBER, FrameRow
from tritone.pipelines.qwen3_omni.loop_guard import LoopGuard
from tritone.pipelines.qwen3_omni.memory import talker_terms
from tritone.pipelines.qwen3_omni.session_rows import SessionRows, project
from tritone.ports import Array
from tritone.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from tritone.engines.prompt_graph import PromptGraphs
    from tritone.networks.spans import Span
    from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
    from tritone.pipelines.qwen3_omni.frame import Codec, Flight, Frames

NO_KEY = 0  # of every row: nothing is ever shared between two sequences


@dataclass(frozen=True)
class TalkerOptions(SlotOptions):
    load_format: LoadFormat = "auto"  # dummy: random weights in the shapes of config.json, to measure with
    max_looped_frames: Annotated[int, Meta(ge=0)] = 100  # then finish reason `repetition`; 0: never
    residual_temperature: Annotated[float, Meta(gt=0)] = 1.0  # of the codes of a frame after the first
    residual_top_k: Annotated[int, Meta(ge=0)] = 50  # of them; neither holds where the talker is greedy
    residual_top_p: Annotated[float, Meta(gt=0, le=1)] = 0.8  # of them
    cuda_graphs: bool = True  # on a GPU: a frame is one launch; else operation by operation
    kernels: bool = True  # in kernels of our own; else in plain torch
    overlap: bool = True  # a frame may begin before the frame before it was told
    batch_invariant: bool = False  # always the kernels of the largest batch: codes never depend on the load

    @property
    def residual(self) -> Sampling:
        """Of the codes of a frame after the first."""
        return Sampling(
            temperature=self.residual_temperature,
            top_k=self.residual_top_k,
            top_p=self.residual_top_p,
        )


@dataclass(eq=False, kw_only=True)
class _Session(SlotSession):
    rows: SessionRows
    guard: LoopGuard
    text: Tensor | None = None  # [H]: what the next row that draws is made of, if that has come
    codes: list[int] = field(default_factory=list)  # code 0 of every token drawn, the end sign included
    num_frames: int = 0  # told
    draws: int = 0  # launched, of which some are not told yet
    awaits_text: bool = False  # the next frame has no text row yet

    @property
    def has_prompt(self) -> bool:
        """The last row of the prompt, that of the first token to speak, is known."""
        return self.prompt_tokens > 0

    @property
    def unread(self) -> int:
        """Rows of the prompt that are known and not in the cache, but for the last one, which draws."""
        return max(0, self.pending - self.has_prompt)

    @property
    def usage(self) -> dict[str, int | float]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.codes),
            "codec_frames": self.num_frames,
            **self.durations,
        }


class _Launched(NamedTuple):
    """Frames on their way, and whose they are."""

    flight: Flight
    sessions: list[_Session]
    last: list[bool]  # the draw ends its session, whatever comes


class Talker(SlotEngine[_Session]):
    """inputs, pushed: `prompt_ids` int32 [U], `prompt_positions` float32 [3, U + 9], `media_rows` float32
    [M, H of the thinker], `token_ids` int32 [t]. outputs: `frames` int32 [F, code groups].
    settings: `sampling`, of code 0; `speaker`, a name or None.
    """

    Options = TalkerOptions
    _reads_in_turn = False  # nothing is shared between prompts

    def __init__(self, placement: Placement, options: TalkerOptions) -> None:
        torch = prepared_torch(placement)
        from tritone.engines.graph_memory import buckets
        from tritone.networks.decoder import Decoder
        from tritone.networks.decoder_config import DecoderConfig
        from tritone.pipelines.qwen3_omni.checkpoint_weights import open_weights
        from tritone.pipelines.qwen3_omni.code_predictor import CodePredictor
        from tritone.pipelines.qwen3_omni.frame import Codec, EagerFrames
        from tritone.pipelines.qwen3_omni.positions import positions_of
        from tritone.pipelines.qwen3_omni.speech_inputs import SpeechInputs

        config = OmniConfig.read(placement.checkpoint)
        shape = DecoderConfig.from_hf(config.talker["text_config"], family="qwen3_moe")
        options.check_context(shape.max_positions)
        dtype = getattr(torch, options.dtype)
        weights = open_weights(placement, options.load_format, dtype)
        graphs = self._has_graphs(placement, options)
        decoder = Decoder(
            shape,
            weights,
            slots=options.max_slots + graphs,
            context_tokens=options.max_context_tokens,
            device=placement.device,
            dtype=dtype,
            prefix="talker.model.",
            embedding="codec_embedding.weight",
            head="talker.codec_head.weight",
            cleared=graphs,
        )
        super().__init__(options, decoder, reuse=False)
        self._options, self._config = options, config
        self._positions_of = positions_of
        self._inputs = SpeechInputs(config, weights, decoder)
        predictor = CodePredictor(
            config.talker["code_predictor_config"],
            weights,
            rows=buckets(1, options.max_slots)[-1],
            device=placement.device,
            dtype=dtype,
        )
        codec = Codec.of(shape.vocab_size, config.codec.eos, options.residual, decoder.device)
        self._frames: Frames = EagerFrames(decoder, predictor, codec)
        self._prompts: PromptGraphs | None = None
        if graphs:
            self._capture(predictor, codec)
        self._launched: deque[_Launched] = deque()
        self._told: dict[str, _Session] = {}  # whose tokens the next step projects, all in one pass
        self._counts["codec_frames"] = 0
        self._warm_up()

    @classmethod
    def memory(cls, ground: Ground, options: TalkerOptions) -> list[Term]:
        return talker_terms(ground, options)

    @staticmethod
    def _has_graphs(placement: Placement, options: TalkerOptions) -> bool:
        return options.cuda_graphs and placement.device != "cpu"

    def _capture(self, predictor: CodePredictor, codec: Codec) -> None:
        """To be called once, before the first session, if steps are to be graphs."""
        from tritone.engines.prompt_graph import prompt_graphs
        from tritone.pipelines.qwen3_omni.frame_graph import graph_frames

        options = self._options
        self._prompts = prompt_graphs(
            self._decoder,
            options.prefill_chunk_tokens,
            slots=options.max_slots,
            kernels=options.kernels,
            one_bucket=options.batch_invariant,
        )
        self._frames = graph_frames(
            self._decoder,
            predictor,
            codec,
            slots=options.max_slots,
            overlaps=options.overlap,
            kernels=options.kernels,
            one_bucket=options.batch_invariant,
        )

    # -- the interface --------------------------------------------------------------------------------------

    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        self._check_room(session)
        speaker = check_speaker(settings.get("speaker"), tuple(sorted(self._config.speakers)))
        new = _Session(
            id=session,
            sampling=sampling_of(settings),
            keys=[],
            rows=SessionRows(self._inputs, self._config.speakers[speaker]),
            guard=LoopGuard(self._options.max_looped_frames),
        )
        if inputs:
            self._take_in(new, inputs)
        self._sessions[session] = new

    def push(self, session: str, inputs: Values, last: bool) -> None:
        known = self._sessions.get(session)
        if known is None:
            return
        try:
            self._take_in(known, inputs)
            if last:
                known.rows.text_ended = True
                self._project()
                self._make_rows(known)
                if known.rows.texts and not known.has_prompt:
                    raise TritoneError("the rows behind media tokens never came", "try again")
                if not known.has_prompt:
                    self._end_unspoken(known)
        except TritoneError as error:
            self._refuse(session, error)

    # -- what comes in --------------------------------------------------------------------------------------

    def _take_in(self, session: _Session, inputs: Values) -> None:
        session.rows.take_in(inputs)
        rows, most = session.rows.num_prompt_rows, self._options.max_context_tokens
        if rows >= most:
            raise InvalidRequest(
                f"messages fills {rows} positions of the talker, and prompt and speech may fill {most}",
                "send less text or fewer media, or ask for modalities 'text'",
            )
        if session.rows.told:
            self._told[session.id] = session
        self._make_rows(session)

    def _project(self) -> None:
        told = [s for s in self._told.values() if self._sessions.get(s.id) is s]
        if told:
            project(self._inputs, [session.rows for session in told])
            for session in told:
                self._make_rows(session)
        self._told.clear()  # last: what a failed pass has left is not forgotten

    def _make_rows(self, session: _Session) -> None:
        """Take every input row whose parts have come; a session with its first rows waits for a slot."""
        if not session.keys:
            begun = session.rows.begin_prompt()
            if begun:
                session.keys += [NO_KEY] * begun
                self._queue(session)
        if session.keys and not session.has_prompt and self._add_row(session, session.rows.last_of_prompt()):
            session.prompt_tokens = len(session.keys)
        if session.awaits_text:
            session.awaits_text = not self._add_row(session, session.rows.text(session.draws))

    def _add_row(self, session: _Session, text: Tensor | None) -> bool:
        """Let the next frame be made of a text [H]; False if there is none."""
        if text is None:
            return False
        session.text = text
        session.keys.append(NO_KEY)
        return True

    def _end_unspoken(self, session: _Session) -> None:
        """The answer had no token to speak."""
        session.started_s = session.first_token_s = session.ready_s = time.monotonic()
        usage = session.usage
        self.abort(session.id)
        self._refused.append(Delta(session.id, {}, "stop", usage))

    # -- a step ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._launched or self._told)

    def _rows(self, session: _Session, span: Span) -> Tensor:
        return session.rows.of_prompt(span.start, span.end)

    def _begun(self, session: _Session) -> list[Delta]:
        self._frames.begin(session.held.index)
        return []

    def _advance(self) -> list[Delta]:
        self._project()
        self._read_prompts()
        due = [s for s in self._running.values() if s.has_prompt and s.pending == 1]
        if due:
            self._launch(due)
        on_their_way = int(bool(due) and self._frames.overlaps)
        deltas: list[Delta] = []
        while len(self._launched) > on_their_way:
            deltas += self._landed(self._launched.popleft())
        return deltas

    def _read_prompts(self) -> None:
        """Run pieces of prompts: all their rows but the last, which draws."""
        most = left = self._slot_options.prefill_chunk_tokens
        sessions, spans = [], []
        for session in self._running.values():
            count = min(session.unread, most)
            if 0 < count <= left:  # no piece is cut because of another: a short one costs nearly as much
                sessions.append(session)
                spans.append(self._span(session.held.index, session.held.filled, count))
                left -= count
        if not sessions:
            return
        rows = self._joined([self._rows(s, span) for s, span in zip(sessions, spans, strict=True)])
        positions = self._positions_of([session.rows.positions for session in sessions], spans)
        if self._prompts is None:
            self._decoder.forward(rows, spans, positions=positions)
        else:
            self._prompts.read(rows, spans, positions)
        for session, span in zip(sessions, spans, strict=True):
            session.held.filled = span.end
            if not session.unread:
                session.rows.prompt = None

    def _launch(self, due: list[_Session]) -> None:
        """Begin a frame for each session."""
        rows = [self._frame_of(session) for session in due]
        self._launched.append(_Launched(self._frames.launch(rows), due, [row.is_last for row in rows]))
        self._counts["steps"] += 1
        for session, row in zip(due, rows, strict=True):
            session.text = None
            session.held.filled += 1
            session.draws += 1
            if self._frames.overlaps and not row.is_last:
                self._await_text(session)

    def _frame_of(self, session: _Session) -> FrameRow:
        sampling, place, positions = session.sampling, session.held.filled, session.rows.positions
        is_full = len(session.keys) >= self._options.max_context_tokens
        assert session.text is not None
        return FrameRow(
            slot=session.held.index,
            place=place,
            position=None if positions is None else positions.of(place),
            text=session.text,
            begins=not session.draws,
            sampling=sampling,
            draws=session.draws,
            drawn=session.codes,
            # The end sign is no code: where it must not end the speech, it must not come.
            bars_end=sampling.ignore_eos or session.draws < sampling.min_tokens,
            is_last=is_full or session.draws + 1 >= sampling.max_tokens,
        )

    def _landed(self, launched: _Launched) -> list[Delta]:
        """What there is to say of frames; those of sessions that have ended meanwhile are nobody's."""
        deltas = []
        frames = launched.flight.frames()
        for session, is_last, frame in zip(launched.sessions, launched.last, frames, strict=True):
            if self._sessions.get(session.id) is session:
                deltas.append(self._hear(session, frame, is_last))
        return deltas

    def _hear(self, session: _Session, frame: Array, is_last: bool) -> Delta:
        """Take in a session's next frame int32 [codebooks]."""
        code = int(frame[0])
        if code == NOT_A_NUMBER:
            self.abort(session.id)
            return Delta(session.id, error=not_numbers(f"the talker's scores for frame {session.num_frames}"))
        session.codes.append(code)
        self._counts["generated_tokens"] += 1
        if len(session.codes) == 1:
            session.first_token_s = time.monotonic()
            self.note_phase(session.id, DECODE)
        if code == self._config.codec.eos:
            return self._ended(session, "stop")
        if is_last:
            return self._ended(session, "length")
        session.num_frames += 1
        self._counts["codec_frames"] += 1
        if not self._frames.overlaps:
            self._await_text(session)
        outputs: Values = {"frames": frame[None]}
        if session.guard.hear(tuple(frame.tolist())):
            return self._ended(session, "repetition", outputs)
        return Delta(session.id, outputs)

    def _await_text(self, session: _Session) -> None:
        session.awaits_text = True
        self._make_rows(session)

    def _ended(self, session: _Session, reason: str, outputs: Values | None = None) -> Delta:
        delta = Delta(session.id, outputs or {}, reason, session.usage)
        self.abort(session.id)
        return delta

    def _warm_up(self) -> None:
        """Touch every weight: let no listener wait for it."""
        ids = self._config.tokens
        text = np.asarray([ids.im_start, ids.user, ids.im_end, ids.im_end], np.int32)
        greedy = {"sampling": {"temperature": 0.0, "max_tokens": 3, "min_tokens": 3}}
        self.add_request("warm-up", {"prompt_ids": text, "token_ids": text}, greedy)
        self.push("warm-up", {}, last=True)
        self._run_out()
