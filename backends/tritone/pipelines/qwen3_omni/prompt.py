"""From a conversation with attachments to what the thinker reads, and to what the talker reads of it.

    messages ─chat template, tokeniser─► ids with placeholders ─┐
    recordings ──────── mel features ──► audio tower ───────────┼─► a row behind every media token ─► Prompt
    pictures, videos ── patches ───────► vision tower ──────────┘

Placeholders, how many rows stand for each, and the positions of all rows are those of the reference:
`Qwen3OmniMoeProcessor`, and `get_rope_index` of Qwen3OmniMoePreTrainedModelForConditionalGeneration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoePreTrainedModelForConditionalGeneration as Reference,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessorKwargs,
    _get_feat_extract_output_lengths,
)

from tritone.audio import Samples
from tritone.engines.text import ChatTokenizer
from tritone.errors import InvalidRequest
from tritone.pipelines.qwen3_omni.attachments import Attachments
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.pipelines.qwen3_omni.positions import PromptPositions
from tritone.pipelines.qwen3_omni.speech_inputs import SpeechInputs
from tritone.pipelines.qwen3_omni.towers import Seen, Towers
from tritone.ports import Array

# The reference's processor reads videos at a size of its own, whatever the checkpoint's file says.
_VIDEO_SIZE = Qwen3OmniMoeProcessorKwargs._defaults["videos_kwargs"]["size"]
_KEY_SPACE = 1 << 62


@dataclass
class MediaRows:
    """The rows behind the media tokens of a prompt."""

    index: Array  # int64 [M]: their places in the prompt, rising
    values: Tensor  # [M, H]
    visual_index: Array  # int64 [K]: the places of pictures and videos among them
    layers: tuple[Tensor, ...]  # [K, H] each: added there to the output of the first layers (DeepStack)


@dataclass
class Prompt:
    """What the thinker reads, and what the talker reads of it."""

    tokens: list[int]  # [P]
    keys: list[int]  # [P]: the tokens, but for media numbers that tell what is in each row
    positions: PromptPositions | None = None  # None: of each row its place
    media: MediaRows | None = None
    spoken_ids: list[int] = field(default_factory=list)  # [U]: tokens of the user's turns
    spoken_positions: Array | None = None  # float32 [3, U + 9]; None: of each row its place
    head: list[int] = field(default_factory=list)  # tokens that begin the assistant's turn


@dataclass(frozen=True)
class _Item:
    """One attachment, as rows of a prompt."""

    rows: int
    key: int  # from its content
    grid: tuple[int, ...] = ()  # time, height and width in patches
    second_per_grid: float = 0.0
    mel_frames: int = 0

    def keys(self) -> Iterator[int]:
        return (-1 - (self.key + i) % _KEY_SPACE for i in range(self.rows))


@dataclass
class _Scene:
    """All attachments of a prompt."""

    images: list[_Item] = field(default_factory=list)
    audios: list[_Item] = field(default_factory=list)  # the sound of videos included
    videos: list[_Item] = field(default_factory=list)
    with_sound: bool = False  # videos are heard
    heard: Tensor | None = None  # [rows of audios, H]
    seen_images: Seen | None = None
    seen_videos: Seen | None = None

    @property
    def rows(self) -> int:
        """Of all attachments, as far as they are known."""
        return sum(item.rows for item in (*self.images, *self.audios, *self.videos))


class PromptReader:
    """Reads the requests of one thinker; those with media one at a time, others on any thread meanwhile."""

    def __init__(
        self,
        config: OmniConfig,
        tokenizer: ChatTokenizer,
        processor: Any,
        towers: Towers,
        context_tokens: int,
    ) -> None:
        """processor: a `Qwen3OmniMoeProcessor`. context_tokens: of prompt and answer, at most."""
        self._ids = config.tokens
        self._context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._processor = processor
        self._towers = towers
        self.rate_hz = int(processor.feature_extractor.sampling_rate)
        self._positions_per_s = float(config.thinker["position_id_per_seconds"])
        self._temporal_patch = float(config.thinker["vision_config"]["temporal_patch_size"])
        self._thinker_places = _reference_places(config.thinker, towers)
        self._talker_places = _reference_places(config.talker, towers)

    def read(self, messages: Sequence[dict[str, Any]], attached: Attachments, speaks: bool) -> Prompt:
        """messages: role and content, a list of parts; `attached` are its media, in order.

        speaks: a talker reads the prompt too.
        Raises InvalidRequest for media of a shape that the model cannot take, or too many for the context.
        """
        ids = self._tokenizer.prompt(messages)
        scene = self._look(messages, attached) if attached else _Scene()
        tokens, keys = self._expand(ids, scene) if attached else (ids, ids)
        positions = _positions(self._thinker_places, tokens, scene, scene.with_sound)
        prompt = Prompt(tokens, keys, positions, self._media_rows(tokens, scene) if attached else None)
        if speaks:
            self._add_speech(prompt, scene)
        return prompt

    # -- attachments ----------------------------------------------------------------------------------------

    def _look(self, messages: Sequence[dict[str, Any]], attached: Attachments) -> _Scene:
        scene = _Scene(with_sound=attached.with_sound)
        heard = attached.heard(messages)
        if heard:
            self._listen(heard, scene)
        if attached.images:
            looked = _fitting(
                "image",
                self._processor.image_processor,
                images=list(attached.images),
                input_data_format="channels_last",  # else a picture of three rows is taken for three channels
            )
            grids = looked["image_grid_thw"]
            scene.images = [
                self._visual_item(grid, _key(image))
                for image, grid in zip(attached.images, grids, strict=True)
            ]
            self._check_room(scene)
            scene.seen_images = self._towers.see(looked["pixel_values"], grids)
        if attached.videos:
            frames = [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in attached.videos]
            looked = _fitting(
                "video",
                self._processor.video_processor,
                videos=frames,
                size=dict(_VIDEO_SIZE),
                do_sample_frames=False,
            )
            grids = looked["video_grid_thw"]
            scene.videos = [
                self._visual_item(
                    grid,
                    _key(video.frames, video.rate_hz),
                    self._temporal_patch / video.rate_hz,
                )
                for video, grid in zip(attached.videos, grids, strict=True)
            ]
            self._check_room(scene)
            scene.seen_videos = self._towers.see(looked["pixel_values_videos"], grids)
        return scene

    def _check_room(self, scene: _Scene) -> None:
        """Before a tower works on it for long: InvalidRequest when the media alone are too much."""
        if scene.rows >= self._context_tokens:
            raise InvalidRequest(
                f"the media fill {scene.rows} tokens, and prompt and answer together may have"
                f" {self._context_tokens}",
                "send fewer, smaller or shorter media",
            )

    def _listen(self, heard: Sequence[Samples], scene: _Scene) -> None:
        extractor = self._processor.feature_extractor
        longest, least = (
            max(map(len, heard)),
            extractor.n_fft // 2 + 1,
        )  # a window's half is mirrored at the edge
        if longest < least:
            raise InvalidRequest(
                f"audio has {longest} samples at {self.rate_hz} Hz", f"send at least {least} of them"
            )
        features = extractor(
            list(heard),
            sampling_rate=self.rate_hz,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = features["attention_mask"]
        frames = mask.sum(-1)
        counts = _get_feat_extract_output_lengths(frames, self._towers.n_window)
        # A recording beside a longer one is padded to its length, which the last mel frames can see.
        scene.audios = [
            _Item(int(rows), _key(samples, mask.shape[-1]), mel_frames=int(length))
            for samples, rows, length in zip(heard, counts, frames, strict=True)
        ]
        self._check_room(scene)
        scene.heard = self._towers.hear(features["input_features"], mask)

    def _visual_item(self, grid: Tensor, key: int, second_per_grid: float = 0.0) -> _Item:
        rows = int(grid.prod()) // self._towers.spatial_merge_size**2
        return _Item(rows, key, tuple(grid.tolist()), second_per_grid)

    # -- rows -----------------------------------------------------------------------------------------------

    def _expand(self, ids: Sequence[int], scene: _Scene) -> tuple[list[int], list[int]]:
        """Token ids and keys, with every placeholder repeated for each of its rows."""
        images, audios, videos = iter(scene.images), iter(scene.audios), iter(scene.videos)
        tokens: list[int] = []
        keys: list[int] = []
        for token in ids:
            if token == self._ids.video and scene.with_sound:
                self._weave(next(videos), next(audios), tokens, keys)
            elif token in self._ids.media:
                item = next(
                    {self._ids.image: images, self._ids.audio: audios, self._ids.video: videos}[token]
                )
                tokens += [token] * item.rows
                keys += item.keys()
            else:
                tokens.append(token)
                keys.append(token)
        return tokens, keys

    def _weave(self, video: _Item, audio: _Item, tokens: list[int], keys: list[int]) -> None:
        """Rows of a video and of its sound in the order of time, between the signs of a recording."""
        step = video.second_per_grid * self._positions_per_s
        plane = video.rows // video.grid[0]
        rows = [(i // plane * step, 0, self._ids.video, key) for i, key in enumerate(video.keys())]
        rows += [(float(i), 1, self._ids.audio, key) for i, key in enumerate(audio.keys())]
        rows.sort(key=lambda row: row[:2])
        start, end = self._ids.audio_start, self._ids.audio_end
        tokens += [start, *(token for _, _, token, _ in rows), end]
        keys += [start, *(key for _, _, _, key in rows), end]

    def _media_rows(self, tokens: Sequence[int], scene: _Scene) -> MediaRows:
        ids = np.asarray(tokens)
        heard = [] if scene.heard is None else [(self._ids.audio, scene.heard)]
        both = ((self._ids.image, scene.seen_images), (self._ids.video, scene.seen_videos))
        seen = [(token, what) for token, what in both if what is not None]
        index, values = _merged(ids, [*heard, *((token, what.rows) for token, what in seen)])
        if not seen:
            return MediaRows(index, values, np.zeros(0, np.int64), ())
        layers = [
            _merged(ids, [(token, what.layers[i]) for token, what in seen])
            for i in range(len(seen[0][1].layers))
        ]
        return MediaRows(index, values, layers[0][0], tuple(added for _, added in layers))

    # -- what the talker reads -------------------------------------------------------------------------------

    def _add_speech(self, prompt: Prompt, scene: _Scene) -> None:
        """The user's turns, and the beginning of the assistant's; other turns are not for the talker."""
        tokens = prompt.tokens
        starts = [i for i, token in enumerate(tokens) if token == self._ids.im_start]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            if tokens[start + 1] == self._ids.user:
                prompt.spoken_ids += tokens[start:end]
        prompt.head = tokens[starts[-1] :]
        padded = [*prompt.spoken_ids, *[self._ids.tts_pad] * SpeechInputs.num_head_rows]
        # The reference does not tell its talker that the sound of a video is heard.
        positions = _positions(self._talker_places, padded, scene, with_sound=False)
        prompt.spoken_positions = None if positions is None else positions.table.numpy()


def _reference_places(config: Mapping[str, Any], towers: Towers) -> Any:
    """What the reference's `get_rope_index` needs of a model; config: of the thinker or of the talker."""
    names = (
        "image_token_id",
        "video_token_id",
        "audio_token_id",
        "vision_start_token_id",
        "audio_start_token_id",
    )
    return SimpleNamespace(
        spatial_merge_size=towers.spatial_merge_size,
        config=SimpleNamespace(
            **{name: config[name] for name in names},
            position_id_per_seconds=config["position_id_per_seconds"],
            audio_config=SimpleNamespace(n_window=towers.n_window),
        ),
        get_llm_pos_ids_for_vision=partial(Reference.get_llm_pos_ids_for_vision, None),
    )


def _positions(places: Any, tokens: Sequence[int], scene: _Scene, with_sound: bool) -> PromptPositions | None:
    """Positions of a prompt's tokens, or None when each is its place."""
    if not scene.images and not scene.videos:
        return None
    ids = torch.tensor([list(tokens)])
    found, _ = Reference.get_rope_index(
        places,
        ids,
        image_grid_thw=torch.tensor([item.grid for item in scene.images]) if scene.images else None,
        video_grid_thw=torch.tensor([item.grid for item in scene.videos]) if scene.videos else None,
        attention_mask=torch.ones_like(ids),
        use_audio_in_video=with_sound,
        audio_seqlens=torch.tensor([item.mel_frames for item in scene.audios]) if scene.audios else None,
        second_per_grids=torch.tensor([item.second_per_grid for item in scene.videos]),
    )
    return PromptPositions(found[:, 0].float())


def _merged(ids: Array, rows: Sequence[tuple[int, Tensor]]) -> tuple[Array, Tensor]:
    """Places of the tokens in `ids` that have rows, rising, and those rows [M, H] in that order."""
    index = np.concatenate([np.flatnonzero(ids == token) for token, _ in rows])
    order = np.argsort(index)
    values = torch.cat([values for _, values in rows])
    assert len(index) == len(values)
    return index[order], values[torch.from_numpy(order).to(values.device)]


def _fitting(kind: str, processor: Any, **media: Any) -> Any:
    """What the processor makes of media, as tensors."""
    try:
        return processor(**media, return_tensors="pt")
    except ValueError as fault:
        raise InvalidRequest(f"{kind} has a shape that the model cannot take ({fault})", "crop it") from None


def _key(content: Array, *more: float) -> int:
    """A number that tells contents apart."""
    digest = hashlib.sha256(np.ascontiguousarray(content).data)
    digest.update(repr((content.shape, *more)).encode())
    return int.from_bytes(digest.digest()[:7], "little")
