"""smoltalk's Talker: text in as it is thought, codec frames out clause by clause.

    text ─► ClauseCutter ─► clause ─► phonemes ─► talker.onnx ─► frames [F, 131], one segment a clause
                                        (hibari's reader)         130 latent channels, then f0 in Hz

The network speaks a clause in one go (it is not autoregressive), so a step is one clause of one session. The
first clause of a session goes before the later ones of others: those have sound to play meanwhile.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tritone.checkpoint import read_config
from tritone.clauses import ClauseCutter, ClauseLimits
from tritone.engines.base import Delta, Engine, Placement, Values
from tritone.errors import ConfigError, InvalidRequest, Unavailable
from tritone.ports import Array

log = logging.getLogger("tritone.talker")

# Silence that a segment keeps, if it has that much. Its own, 0.3 s a side, is meant for a text of one clause.
_LEAD_S = 0.05
_PAUSE_S = {**dict.fromkeys(".!?…", 0.35), **dict.fromkeys(";:—", 0.2), ",": 0.15}  # after this mark
_PAUSE_WITHOUT_MARK_S = 0.05
_CLOSERS = '"”) '  # phoneme signs that may follow the mark

_UNCOUNTED = frozenset("PZCM")  # Unicode categories that are no loss to a listener: marks, blanks, controls
_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+", re.MULTILINE)
_LINE_END = re.compile(r"(?<=[^\s.,;:!?…—])[ \t]*\n\s*(?=\S)")  # without a mark: still a pause


@dataclass(frozen=True)
class TalkerOptions:
    first_clause_words: Annotated[int, Meta(ge=1)] = ClauseLimits.first_words  # words that are spoken first
    max_clause_words: Annotated[int, Meta(ge=1)] = ClauseLimits.max_words  # words that are spoken in one go
    speed: Annotated[float, Meta(ge=0.5, le=2.0)] = 1.0  # 2.0 speaks twice as fast
    max_sessions: Annotated[int, Meta(ge=1)] = 64  # more are refused UNAVAILABLE
    max_characters: Annotated[int, Meta(ge=1)] = 100_000  # of one session's text


@dataclass
class _Session:
    cutter: ClauseCutter
    clauses: deque[str] = field(default_factory=deque)  # text that waits to be read
    phonemes: deque[str] = field(default_factory=deque)  # of clauses that were read and wait to be spoken
    ended: bool = False  # no more text comes
    finish_reason: str = "stop"
    num_characters: int = 0  # taken in
    codec_frames: int = 0
    spoken_clauses: int = 0
    skipped_characters: int = 0

    @property
    def spoken(self) -> bool:
        return self.ended and not self.clauses and not self.phonemes

    @property
    def has_work(self) -> bool:
        return self.ended or bool(self.clauses) or bool(self.phonemes)

    @property
    def usage(self) -> dict[str, int | float]:
        return {
            "codec_frames": self.codec_frames,
            "clauses": self.spoken_clauses,
            "skipped_characters": self.skipped_characters,
        }


class Talker(Engine):
    """inputs: `text`, with the request or pushed. settings: `speaker`, a name or None.
    outputs: `frames` float32 [F, 131] and `segment_end`, always true: a delta holds a whole segment.
    """

    Options = TalkerOptions

    def __init__(self, placement: Placement, options: TalkerOptions) -> None:
        if placement.device != "cpu":
            raise ConfigError(
                f"the talker of smoltalk runs on a CPU, not on '{placement.device}'", "use KIND_CPU"
            )
        self._options = options
        config = read_config(placement.checkpoint)
        try:
            self._voice = _Voice(placement, config, options.speed)
        except KeyError as missing:
            raise ConfigError(
                f"config.json in '{placement.checkpoint}' has no {missing}", "build the checkpoint again"
            ) from None
        self._limits = ClauseLimits(
            first_words=options.first_clause_words, max_words=options.max_clause_words
        )
        self._sessions: dict[str, _Session] = {}  # in the order of their next turn
        self._counts = {"codec_frames": 0, "clauses": 0}

    @property
    def speakers(self) -> tuple[str, ...]:
        return self._voice.speakers

    @property
    def frame_rate_hz(self) -> float:
        return self._voice.frame_rate_hz

    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        self._check_speaker(settings.get("speaker"))
        text = _text(inputs)
        if len(text) > self._options.max_characters:
            raise InvalidRequest(
                f"text has {len(text)} characters, more than {self._options.max_characters}",
                "send it in parts",
            )
        if len(self._sessions) >= self._options.max_sessions:
            raise Unavailable(
                f"the talker holds {len(self._sessions)} sessions, its limit", "try again shortly"
            )
        self._sessions[session] = _Session(ClauseCutter(self._limits))
        self._take_in(self._sessions[session], text)

    def push(self, session: str, inputs: Values, last: bool) -> None:
        state = self._sessions.get(session)
        if state is None or state.ended:
            return
        self._take_in(state, _text(inputs))
        if last:
            self._end(state)

    def step(self) -> list[Delta]:
        name = self._next_session()
        if name is None:
            return []
        session = self._sessions[name] = self._sessions.pop(name)  # to the end of the queue
        if not session.phonemes and session.clauses:
            self._read(session, session.clauses.popleft())
        outputs: Values = {}
        if session.phonemes:
            outputs = {"frames": self._speak(session, session.phonemes.popleft()), "segment_end": True}
        if session.spoken:
            del self._sessions[name]
            return [Delta(name, outputs, session.finish_reason, session.usage)]
        return [Delta(name, outputs)] if outputs else []

    @property
    def has_work(self) -> bool:
        return any(session.has_work for session in self._sessions.values())

    def abort(self, session: str) -> None:
        self._sessions.pop(session, None)

    def stats(self) -> dict[str, int | float]:
        waiting = sum(len(session.clauses) for session in self._sessions.values())
        return {"active": len(self._sessions), "waiting_clauses": waiting, **self._counts}

    def _check_speaker(self, speaker: Any) -> None:
        if speaker is not None and str(speaker).strip().lower() not in self.speakers:
            raise InvalidRequest(f"unknown speaker '{speaker}'", f"known: {', '.join(self.speakers)}")

    def _take_in(self, session: _Session, text: str) -> None:
        room = self._options.max_characters - session.num_characters
        session.num_characters += len(text)
        session.clauses += filter(str.strip, session.cutter.push(text[:room]))
        if len(text) > room:
            session.finish_reason = "length"
            self._end(session)

    def _end(self, session: _Session) -> None:
        session.clauses += filter(str.strip, session.cutter.finish())
        session.ended = True

    def _next_session(self) -> str | None:
        """Whose turn it is: who has not spoken yet, else who has waited longest."""
        able = [name for name, session in self._sessions.items() if session.has_work]
        return next(
            (name for name in able if not self._sessions[name].codec_frames), able[0] if able else None
        )

    def _read(self, session: _Session, clause: str) -> None:
        phonemes = self._voice.read(clause)
        session.phonemes += phonemes
        session.skipped_characters += self._voice.num_unreadable(clause)
        session.spoken_clauses += bool(phonemes)
        self._counts["clauses"] += bool(phonemes)

    def _speak(self, session: _Session, phonemes: str) -> Array:
        frames = self._voice.speak(phonemes)
        session.codec_frames += len(frames)
        self._counts["codec_frames"] += len(frames)
        return frames


class _Voice:
    """Text to phonemes to frames; knows nothing of sessions. Reads only local files."""

    def __init__(self, placement: Placement, config: Mapping[str, Any], speed: float) -> None:
        import onnxruntime
        from hibari.g2p import G2P

        self.speakers = tuple(name.lower() for name in config["speakers"])
        self.frame_rate_hz = float(config["frame_rate_hz"])
        self._ids: dict[str, int] = config["phoneme_ids"]
        self._pad_id: int = config["pad_id"]
        self._max_phonemes: int = config["max_phonemes"]
        self._energy_channel: int = config["energy_channel"]
        self._silent_below: float = config["silent_below"]
        self._to_phonemes: Callable[[str], str] = G2P(british=config["british"])
        self._speed = np.full(1, speed, np.float32)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = placement.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # the graph's unused outputs are no news
        self._network = onnxruntime.InferenceSession(
            placement.checkpoint / "talker.onnx", options, providers=["CPUExecutionProvider"]
        )
        self.num_unreadable("\N{COPYRIGHT SIGN}")
        for phonemes in self.read("Warm-up, Tritone!"):
            self.speak(phonemes)

    def read(self, text: str) -> list[str]:
        """Phonemes of `text`, cut where the voice's limit is; [] when nothing in it can be spoken."""
        phonemes = "".join(
            p for p in self._phonemes(_LINE_END.sub(". ", _HEADING.sub("", text))) if p in self._ids
        )
        parts = []
        while len(phonemes) > self._max_phonemes:
            end = 1 + phonemes.rfind(" ", 0, self._max_phonemes) or self._max_phonemes
            parts.append(phonemes[:end])
            phonemes = phonemes[end:]
        return [part for part in (*parts, phonemes) if any(map(str.isalpha, part))]

    def speak(self, phonemes: str) -> Array:
        """Frames float32 [F, latent_channels + 1] of up to `max_phonemes` phonemes."""
        ids = np.asarray([[self._pad_id, *(self._ids[p] for p in phonemes), self._pad_id]], np.int64)
        latent, f0 = self._network.run(["latent", "f0"], {"ids": ids, "speed": self._speed})
        frames = np.concatenate([latent[0].T, f0[0][:, None]], axis=1, dtype=np.float32)
        pause_s = _PAUSE_S.get(phonemes.rstrip(_CLOSERS)[-1:], _PAUSE_WITHOUT_MARK_S)
        return self._trimmed(frames, round(_LEAD_S * self.frame_rate_hz), round(pause_s * self.frame_rate_hz))

    def _trimmed(self, frames: Array, lead: int, pause: int) -> Array:
        """`frames` with no more silent ones than `lead` before and `pause` after what is heard."""
        heard = np.flatnonzero(frames[:, self._energy_channel] >= self._silent_below)
        if not len(heard):
            return frames
        return frames[max(0, heard[0] - lead) : heard[-1] + 1 + pause]

    def num_unreadable(self, text: str) -> int:
        """How many characters of `text` are signs or letters that the reader passes over."""
        return sum(not self._is_readable(character) for character in text)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - a voice lives as long as its process
    def _is_readable(self, character: str) -> bool:
        if character.isascii() or unicodedata.category(character)[0] in _UNCOUNTED:
            return True
        return bool(self._phonemes(character))

    def _phonemes(self, text: str) -> str:
        try:
            return self._to_phonemes(text)
        except Exception:
            # The reader has many rules, and its input is whatever a model or a caller writes: circled digits
            # and numbers of 40 digits break some. Then it reads word by word, and such a word sign by sign.
            log.debug("cannot read %r aloud in one go", text, exc_info=True)
            parts = text.split() if len(text.split()) > 1 else list(text) if len(text) > 1 else []
            return " ".join(filter(None, map(self._phonemes, parts)))


def _text(inputs: Values) -> str:
    text = inputs.get("text", "")
    if not isinstance(text, str):
        raise InvalidRequest(f"text is of type {type(text).__name__}", "send a string")
    return text
