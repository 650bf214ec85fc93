"""What the thinker sees and hears with: the encoders of `transformers`, with the checkpoint's weights.

mel features ─► audio tower ─► a row for each audio token
patches      ─► vision tower ─► a row for each image or video token, and rows for the first layers (DeepStack)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)

from tritone.networks.weights import Weights


@dataclass(frozen=True)
class Seen:
    """Rows of pictures or videos."""

    rows: Tensor  # [K, H]: what stands in the prompt
    layers: tuple[Tensor, ...]  # [K, H] each: what is added to the output of the decoder's first layers


class Towers:
    """Both encoders of a checkpoint."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Weights,
        device: str,
        dtype: torch.dtype,
        prefix: str = "thinker.",
    ) -> None:
        """config: `thinker_config`."""
        audio = Qwen3OmniMoeAudioEncoderConfig(**config["audio_config"])
        vision = Qwen3OmniMoeVisionEncoderConfig(**config["vision_config"])
        self._device, self._dtype = torch.device(device), dtype
        with no_init_weights():
            self._audio = Qwen3OmniMoeAudioEncoder._from_config(audio, dtype=dtype)
            self._vision = Qwen3OmniMoeVisionEncoder._from_config(vision, dtype=dtype)
        for tower, name in ((self._audio, "audio_tower."), (self._vision, "visual.")):
            _load(tower, weights, prefix + name)
            tower.to(self._device).eval().requires_grad_(False)
        self.n_window: int = audio.n_window  # half a piece of the audio tower, in mel frames
        self.spatial_merge_size: int = vision.spatial_merge_size

    @torch.inference_mode()
    def hear(self, features: Tensor, mask: Tensor) -> Tensor:
        """Rows [K, H] of recordings: mel features float32 [n, mel, T], mask [n, T] of their real frames."""
        mask = mask.bool()
        flat = features.transpose(1, 2)[mask].T.to(self._device, self._dtype)
        rows: Tensor = self._audio(flat, feature_lens=mask.sum(-1).to(self._device)).last_hidden_state
        return rows

    @torch.inference_mode()
    def see(self, patches: Tensor, grids: Tensor) -> Seen:
        """patches: float32 [P, values]. grids: int64 [n, 3]: time, height and width of items in patches."""
        out = self._vision(patches.to(self._device, self._dtype), grid_thw=grids.to(self._device))
        return Seen(out.pooler_output, tuple(out.deepstack_features))


def _load(tower: nn.Module, weights: Weights, prefix: str) -> None:
    tower.load_state_dict({name: weights[prefix + name] for name in tower.state_dict()})
