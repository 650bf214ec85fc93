"""The codes of a frame after the first: one small decoder pass a codebook, all frames of a batch together.

    hidden state h [B, H] ─┐
    embedding of code 0 ───┴─► decoder ─► head 1 ─► code 1 ─embed─► decoder ─► head 2 ─► … ─► code 15

Reference: Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration; the paper calls it the MTP module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritone.networks.decoder import Decoder
from tritone.networks.decoder_config import DecoderConfig
from tritone.networks.linear import Linear
from tritone.networks.spans import Span
from tritone.networks.weights import Weights


class CodePredictor:
    """Codes 1 to 15 of a frame from the talker's hidden state and code 0."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Weights,
        *,
        rows: int,
        device: str,
        dtype: torch.dtype,
        prefix: str = "talker.code_predictor.",
    ) -> None:
        """config: `code_predictor_config`. rows: frames that are made at the same time, at most."""
        self.num_residuals = int(config["num_code_groups"]) - 1
        self.vocab_size = int(config["vocab_size"])
        shape = DecoderConfig.from_hf(config, family="qwen3")
        self.decoder = Decoder(
            shape,
            weights,
            slots=rows,
            context_tokens=self.num_residuals + 2,
            device=device,
            dtype=dtype,
            prefix=f"{prefix}model.",
            embedding=None,
            head=None,
        )

        def load(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"].to(self.decoder.device, dtype)

        with torch.inference_mode():
            self.heads = [Linear(load(f"lm_head.{i}")) for i in range(self.num_residuals)]
            self.embeddings = [load(f"model.codec_embedding.{i}") for i in range(self.num_residuals)]

    @torch.inference_mode()
    def __call__(
        self,
        hidden: Tensor,
        embedded: Tensor,
        draw: Callable[[Tensor, int], Tensor],
        codebooks: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Codes int64 [B, residuals], and the sum of the embeddings of all codes of each frame [B, H].

        hidden: [B, H], the talker's. embedded: [B, H], of code 0. codebooks: the residuals' numbers in draws.
        draw: from float32 scores [B, V] and a codebook's number to codes int64 [B].
        """
        batch = len(hidden)
        spans = [Span(slot, 0, 2) for slot in range(batch)]
        rows = torch.stack((hidden, embedded), dim=1).flatten(0, 1)
        out = self.decoder.forward(rows, spans).hidden[1::2]
        codes: list[Tensor] = []
        embeddings = [embedded]
        for i, codebook in enumerate(codebooks):
            codes.append(draw(self.heads[i](out).float(), codebook))
            embeddings.append(self.embeddings[i][codes[-1]])
            if i + 1 < self.num_residuals:
                spans = [Span(slot, i + 2) for slot in range(batch)]
                out = self.decoder.forward(embeddings[-1], spans).hidden
        return torch.stack(codes, dim=1), torch.stack(embeddings, dim=1).sum(1)
