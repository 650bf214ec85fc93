"""Qwen3-Omni's Thinker as vLLM runs it: vLLM's own decoder, with rows of media and positions from outside.

    rows of media, made by towers.py ─► embed_multimodal ─► decoder of vLLM ─► hidden states, logits
    positions, in units of RunnerRequest ─► rotation of queries and keys, exact for a fraction of a second too

vLLM's class has towers of its own, and rounds a video's times to whole positions, which the reference does
not; so both are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models import qwen3_omni_moe_thinker as theirs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import StageMissingLayer, WeightsMapper, no_init_weights
from vllm.multimodal import MULTIMODAL_REGISTRY

from tritone.engines.vllm import contract
from tritone.engines.vllm.contract import Part
from tritone.engines.vllm.media import ROWS, RowsInfo, RowsProcessor, RowsRehearsal
from tritone.engines.vllm.request import POSITION_UNIT
from tritone.networks.rotary import Rotary, rope_parameters

ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
PARTS = (
    Part(
        theirs.__name__,
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        (
            "_mark_tower_model",
            "_tower_model_names",
            "embed_multimodal",
            "embed_input_ids",
            "hf_to_vllm_mapper",
        ),
        mentions=(
            "self.config = ",
            "self.use_deepstack",
            "self.deepstack_num_level",
            "self.deepstack_input_embeds",
            "self.deepstack_input_embeds_num_tokens",
            "self.visual.deepstack_visual_indexes",
            "self.language_model",
        ),
    ),
    Part(
        theirs.__name__,
        "Qwen3MoeLLMModel",
        ("_set_aux_hidden_state_layers", "_maybe_add_hidden_state", "embed_input_ids"),
        mentions=("self.layers", "self.norm", "deepstack_input_embeds_"),
    ),
    Part("vllm.model_executor.models.qwen3_moe", "Qwen3MoeDecoderLayer", mentions=("self.self_attn",)),
    Part(
        "vllm.model_executor.models.qwen3_moe",
        "Qwen3MoeAttention",
        mentions=("self.rotary_emb(positions, q, k)",),
    ),
    Part(
        "vllm.model_executor.models.interfaces",
        "SupportsEagle3",
        ("supports_eagle3", "set_aux_hidden_state_layers"),
    ),
    Part("vllm.compilation.decorators", "support_torch_compile", parameters=("dynamic_arg_dims",)),
    Part("vllm.model_executor.models.utils", "StageMissingLayer"),
    Part("vllm.model_executor.models.utils", "no_init_weights"),
    Part("vllm.model_executor.models.utils", "WeightsMapper", ("orig_to_new_prefix",)),
)
TELLS_LAYERS = hasattr(theirs.Qwen3OmniMoeThinkerForConditionalGeneration, "set_aux_hidden_state_layers")


def register() -> None:
    """Make vLLM use the class below for the checkpoint's architecture, in this process.

    ConfigError when this release of vLLM has not what the class stands on.
    """
    contract.check(PARTS)
    ModelRegistry.register_model(ARCHITECTURE, ThinkerOnVllm)


class ExactRotation(nn.Module):
    """Rotation by positions int64 [3, N] in units of 1 / POSITION_UNIT; vLLM's own knows whole ones only."""

    def __init__(self, text_config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._head_dim = int(text_config["head_dim"])
        rope = rope_parameters(text_config, self._head_dim)
        self._rotary = Rotary(rope, self._head_dim, device, dtype)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(positions.float() / POSITION_UNIT)
        return self._turned(query, cos, sin), self._turned(key, cos, sin)

    def _turned(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = rows.view(rows.shape[0], -1, self._head_dim)
        return (heads * cos + heads.roll(self._head_dim // 2, -1) * sin).view_as(rows)


class NoTower(nn.Module):
    """What the class of vLLM asks its vision tower for when rows come."""

    def __init__(self, deepstack_visual_indexes: list[int]) -> None:
        super().__init__()
        self.deepstack_visual_indexes = deepstack_visual_indexes


@MULTIMODAL_REGISTRY.register_processor(RowsProcessor, info=RowsInfo, dummy_inputs=RowsRehearsal)
class ThinkerOnVllm(theirs.Qwen3OmniMoeThinkerForConditionalGeneration):
    """vLLM's Thinker without towers."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.visual.": None,
            "thinker.audio_tower.": None,
            **theirs.Qwen3OmniMoeThinkerForConditionalGeneration.hf_to_vllm_mapper.orig_to_new_prefix,
        }
    )

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        with _body_that_tells_layers():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        levels = list(config.vision_config.deepstack_visual_indexes)
        self.visual = NoTower(levels)
        self.use_deepstack = True
        self.deepstack_num_level = len(levels)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self.deepstack_input_embeds = [torch.zeros(most, config.text_config.hidden_size) for _ in levels]
        self.deepstack_input_embeds_num_tokens = 0
        layers = self.language_model.model.layers
        some = next(layers[0].parameters())
        rotation = ExactRotation(config.text_config.to_dict(), some.device, vllm_config.model_config.dtype)
        for layer in layers:
            layer.self_attn.rotary_emb = rotation

    @contextmanager
    def _mark_tower_model(self, *_: Any, **__: Any) -> Iterator[None]:
        """No tower is built."""
        with no_init_weights(self, lambda module: StageMissingLayer("tower", module)):
            yield
        self._tower_model_names: list[str] = []

    def embed_multimodal(self, **given: Any) -> tuple[Tensor, ...]:
        device = next(self.language_model.parameters()).device
        return tuple(rows.to(device) for rows in given.get(ROWS, ()))

    if not TELLS_LAYERS:
        supports_eagle3 = True

        def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
            self.language_model.model._set_aux_hidden_state_layers(layers)


@contextmanager
def _body_that_tells_layers() -> Iterator[None]:
    """Before 0.30 the Thinker's layers keep their hidden states to themselves."""
    if TELLS_LAYERS:
        yield
        return
    quiet = theirs.Qwen3MoeLLMModel
    theirs.Qwen3MoeLLMModel = _telling(quiet)
    try:
        yield
    finally:
        theirs.Qwen3MoeLLMModel = quiet


def _telling(quiet: Any) -> Any:
    from vllm.compilation.decorators import support_torch_compile

    @support_torch_compile(
        dynamic_arg_dims={
            "input_ids": 0,
            "positions": -1,
            "intermediate_tensors": 0,
            "inputs_embeds": 0,
            "deepstack_input_embeds": 0,
        }
    )
    class TellingModel(quiet):
        def forward(
            self,
            input_ids: Tensor | None,
            positions: Tensor,
            intermediate_tensors: Any = None,
            inputs_embeds: Tensor | None = None,
            deepstack_input_embeds: Any = None,
        ) -> Any:
            hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            residual = None
            told = self._maybe_add_hidden_state([], 0, hidden, residual)
            for number, layer in enumerate(self.layers):
                hidden, residual = layer(positions, hidden, residual)
                if deepstack_input_embeds is not None and number < len(deepstack_input_embeds):
                    hidden = hidden + deepstack_input_embeds[f"deepstack_input_embeds_{number}"]
                told = self._maybe_add_hidden_state(told, number + 1, hidden, residual)
            hidden, _ = self.norm(hidden, residual)
            return (hidden, told) if told else hidden

    return TellingModel
