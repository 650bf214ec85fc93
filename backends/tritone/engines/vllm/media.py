"""Rows of media, made by our own towers, as items that vLLM takes into a prompt.

    rows [M, W] at places of a prompt ─► pieces: consecutive, at most PIECE_ROWS ─► vLLM's multimodal input

vLLM knows one modality, "image", whose encoder gives back what it is given. A piece is known by its content,
so that prompts that begin alike share their KV blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.inputs import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from tritone.ports import Array

MODALITY = "image"
ROWS = "tritone_rows"  # keyword argument of the model's `embed_multimodal`: tensors [n, W]
PIECE_ROWS = 256  # vLLM reserves room for a whole piece


def pieces(places: Array, breaks: Array) -> list[tuple[int, int]]:
    """Where the rows at `places` int64 [M], rising, are cut: half-open ranges of their numbers.

    breaks: bool [M]; a row that begins a piece in any case.
    """
    ranges: list[tuple[int, int]] = []
    for number, place in enumerate(places):
        start, end = ranges[-1] if ranges else (0, 0)
        if not ranges or breaks[number] or place != places[number - 1] + 1 or end - start == PIECE_ROWS:
            ranges.append((number, number + 1))
        else:
            ranges[-1] = (start, number + 1)
    return ranges


def prompt_input(
    tokens: Sequence[int], keys: Sequence[int], rows: Sequence[tuple[int, Any]] = ()
) -> Mapping[str, Any]:
    """What `LLMEngine.add_request` takes for a prompt.

    tokens: ids of all rows, those of media one and the same. keys: numbers that tell what is in each row.
    rows: the pieces, each its first place and its rows, a tensor [n, W].
    """
    if not rows:
        given: Mapping[str, Any] = tokens_input(list(tokens))
        return given
    items: list[Any] = []
    for _, values in rows:
        # What stays on the CPU stays with the request: from 0.32 on vLLM drops other data of prompts that its
        # cache holds, and lacks it when such a prompt has lost its blocks and is read once more.
        field = {ROWS: MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=True)}
        items += MultiModalKwargsItems.from_hf_inputs({ROWS: values[None]}, field)[MODALITY]
    given = mm_input(
        list(tokens),
        MultiModalKwargsItems({MODALITY: items}),
        {MODALITY: [_key(keys[place : place + len(values)]) for place, values in rows]},
        {MODALITY: [PlaceholderRange(offset=place, length=len(values)) for place, values in rows]},
    )
    return given


def _key(keys: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(keys, np.int64).tobytes()).hexdigest()


class RowsInfo(BaseProcessingInfo):
    """What vLLM plans with: no processor of a checkpoint is loaded."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {MODALITY: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {MODALITY: PIECE_ROWS}


class RowsRehearsal(BaseDummyInputsBuilder[RowsInfo]):
    """vLLM rehearses encoders with it; there is none to rehearse (`skip_mm_profiling`)."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, *arguments: Any, **named: Any) -> Any:
        return {}


class RowsProcessor(BaseMultiModalProcessor[RowsInfo]):
    """Never asked: prompts come processed."""

    def _get_mm_fields_config(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def _get_prompt_updates(self, *arguments: Any) -> Any:
        raise NotImplementedError
