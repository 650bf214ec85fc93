"""Rows that the talker reads: the thinker's tokens and hidden states, projected, and the signs between them.

    token id ─► thinker's embedding ─► text projection ──┐
    thinker's hidden state at media ─► hidden projection ┴─► user's turns [U, H]

    text side    sign role break │ pad     pad       pad       pad     tts_bos │ first token
    codec side     0   0     0   │ nothink think_bos think_eos speaker pad     │ bos
                                   └─ the head [8, H] ────────────────────────┘ └─ the last row of the prompt

Reference: `_get_talker_user_parts` and `_get_talker_assistant_parts` of Qwen3OmniMoeForConditionalGeneration.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.networks.decoder import Decoder
from tritone.networks.linear import Linear
from tritone.networks.transfer import array_on_device, on_device
from tritone.networks.weights import Weights
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.pipelines.qwen3_omni.positions import PromptPositions
from tritone.ports import Array

_PADDED = 4  # positions of the head without text
_PASS_ROWS = 64  # tokens of a pass over those that are to be spoken


@dataclass(frozen=True, eq=False)
class SpeechPrompt:
    """What the rows of a prompt but its last are made of, on the host."""

    tokens: Array  # int64 [U + 8]: of the text side; padding where media are
    places: Array  # int64 [M]: of media tokens, ascending
    media: tuple[Array, ...]  # float32 [m, H of the thinker] each, at least M rows in all
    signs: tuple[int, ...]  # of the codec side, at the last rows

    def heard(self, first: int, last: int) -> Array:
        """Rows first to last of the media, in memory of their own."""
        ends = list(accumulate(map(len, self.media)))
        which = range(bisect_right(ends, first), bisect_left(ends, last) + 1)
        parts = []
        for number in which:
            begin = ends[number] - len(self.media[number])
            parts.append(self.media[number][max(0, first - begin) : last - begin])
        return np.concatenate(parts)


class SpeechInputs:
    """Makes input rows of a talker whose decoder is given."""

    num_head_rows = 9  # of a prompt, after the user's turns

    def __init__(self, config: OmniConfig, weights: Weights, decoder: Decoder) -> None:
        self._ids, self._codec = config.tokens, config.codec
        self._decoder = decoder
        self._media = np.array(sorted(self._ids.media))

        def load(name: str) -> Tensor:
            return weights[name].to(decoder.device, decoder.dtype)

        with torch.inference_mode():
            self._embedding = load("thinker.model.embed_tokens.weight")  # [V of the thinker, its H]
            self._text, self._hidden = (
                _Projection(*(load(f"talker.{name}.linear_{part}") for part in _Projection.PARTS))
                for name in ("text_projection", "hidden_projection")
            )
        self.text_end, self.padding = self.texts((self._ids.tts_eos, self._ids.tts_pad)).unbind()  # [H] each

    @torch.inference_mode()
    def texts(self, tokens: Sequence[int]) -> Tensor:
        """Rows [n, H] of tokens to be spoken."""
        return self._text(self._embedding[on_device(tokens, torch.int64, self._decoder.device)])

    @torch.inference_mode()
    def spoken(self, tokens: Sequence[int]) -> list[Tensor]:
        """The rows [H] of tokens of any sessions.

        On a GPU by passes of one shape: what stands beside a token then changes no bit of its row.
        """
        if self._decoder.device.type == "cpu":
            return list(self.texts(tokens).unbind())
        rows: list[Tensor] = []
        for begin in range(0, len(tokens), _PASS_ROWS):
            given = tokens[begin : begin + _PASS_ROWS]
            padded = [*given, *[0] * (_PASS_ROWS - len(given))]
            rows += self.texts(padded)[: len(given)].clone().unbind()  # without memory of the padding
        return rows

    def prompt(
        self, ids: Array, media: Sequence[Array], head: Sequence[int], speaker: int
    ) -> SpeechPrompt | None:
        """A prompt but its last row; None while rows of media are missing. Nothing is computed yet.

        ids: int32 [U], the user's turns. media: float32 [m, H of the thinker] each, behind the media tokens
        among them, in order. head: tokens that begin the assistant's turn. speaker: id in the talker's
        vocabulary.
        """
        is_media = np.isin(ids, self._media)
        if sum(map(len, media)) < is_media.sum():
            return None
        spoken = np.where(is_media, self._ids.tts_pad, ids)
        begun = [*head, *[self._ids.tts_pad] * _PADDED, self._ids.tts_bos]
        codec = self._codec
        return SpeechPrompt(
            np.concatenate([spoken, begun]).astype(np.int64),
            np.flatnonzero(is_media),
            tuple(media),
            (codec.nothink, codec.think_bos, codec.think_eos, speaker, codec.pad),
        )

    def positions(self, table: Array) -> PromptPositions:
        """Of a prompt's rows, float32 [3, P], in memory of their own."""
        return PromptPositions(torch.tensor(table))

    @torch.inference_mode()
    def rows(self, prompt: SpeechPrompt, start: int, end: int) -> Tensor:
        """Rows [end - start, H] of a prompt; nobody waits for what they are made of to be on the device."""
        send = partial(array_on_device, device=self._decoder.device)
        rows = self._text(self._embedding[send(prompt.tokens[start:end])])
        first, last = np.searchsorted(prompt.places, (start, end)).tolist()
        if first < last:
            heard = send(prompt.heard(first, last)).to(self._decoder.dtype)
            rows[send(prompt.places[first:last] - start)] = self._hidden(heard)
        codec_start = len(prompt.tokens) - len(prompt.signs)
        if codec_start < end:
            begin = max(start, codec_start)
            signs = prompt.signs[begin - codec_start : end - codec_start]
            rows[begin - start :] += self._decoder.embed(signs)
        return rows

    @torch.inference_mode()
    def first(self, text: Tensor) -> Tensor:
        """The last row [H] of a prompt, from that of the first token [H]."""
        return text + self._decoder.embed((self._codec.bos,))[0]


class _Projection:
    """Two layers from the thinker's width to the talker's (Qwen3OmniMoeTalkerResizeMLP)."""

    PARTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")

    def __init__(self, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> None:
        self._first, self._second = Linear(weight1, bias1), Linear(weight2, bias2)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._second(F.silu(self._first(rows)))
