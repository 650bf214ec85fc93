"""The chat engine in plain torch: a conversation goes in, text comes out token by token.

add_request ─► [transcripts come] ─► prompt ─► slot ─► a token a step ─► done
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritone.checkpoint import read_config, released_elements
from tritone.engines.base import Placement, Values
from tritone.engines.chat import Conversation
from tritone.engines.graph_memory import token_graph_terms
from tritone.engines.graph_text_engine import GraphOptions, GraphTextEngine, GraphTextSession
from tritone.engines.memory import ITEM_BYTES, Ground, Term, product
from tritone.engines.slot_engine import SlotOptions
from tritone.engines.torch_setup import prepared_torch
from tritone.errors import InvalidRequest, TritoneError
from tritone.networks.decoder_size import DecoderSize


@dataclass(frozen=True)
class TorchOptions(GraphOptions, SlotOptions):
    """Options of `TorchEngine`."""

    system_prompt: str = ""  # for conversations without a system message
    prefix_cache: bool = True  # start a prompt from what a slot remembers of one with the same beginning


@dataclass(eq=False, kw_only=True)
class _Session(GraphTextSession):
    conversation: Conversation


class TorchEngine(GraphTextEngine[_Session]):
    """Llama-, Qwen2- and Qwen3-shaped chat models with continuous batching.

    Ports in: `messages` (JSON list of chat messages) and, pushed once for each audio part in them,
    `transcript`. Ports out: `text` and `num_tokens`, how many tokens are behind it. Settings: `sampling`, as
    `Sampling.as_dict` gives it.
    """

    Options = TorchOptions

    def __init__(self, placement: Placement, options: TorchOptions) -> None:
        torch = prepared_torch(placement)
        from tritone.engines.text import ChatTokenizer
        from tritone.networks.decoder import Decoder
        from tritone.networks.decoder_config import DecoderConfig
        from tritone.networks.weights import Weights

        config = DecoderConfig.from_hf(read_config(placement.checkpoint))
        options.check_context(config.max_positions)
        graphs = self._has_graphs(placement, options)
        decoder = Decoder(
            config,
            Weights(placement.checkpoint),
            slots=options.max_slots + graphs,
            context_tokens=options.max_context_tokens,
            device=placement.device,
            dtype=getattr(torch, options.dtype),
            cleared=graphs,
        )
        super().__init__(options, decoder, ChatTokenizer(placement.checkpoint), options.prefix_cache)
        self._options = options
        if graphs:
            self._capture(options)
        self._greet({"messages": '[{"role": "user", "content": "Hello"}]'})

    @classmethod
    def memory(cls, ground: Ground, options: TorchOptions) -> list[Term]:
        size = DecoderSize.from_hf(read_config(ground.checkpoint))
        item = ITEM_BYTES[options.dtype]
        elements = sum(released_elements(ground.checkpoint).values())
        graphs = ground.on_gpu and options.cuda_graphs
        slots = options.max_slots + graphs
        num_bytes, how = product(size.cache(slots, options.max_context_tokens), item)
        rows = options.prefill_chunk_tokens + options.max_slots
        held = size.pass_elements(rows, options.max_context_tokens) * item
        terms = [
            Term("weights", elements * item, f"{elements:,} by the files × {item} B, {options.dtype}"),
            Term("KV cache", num_bytes, how, lower="max_slots or max_context_tokens"),
        ]
        if graphs:
            return terms + token_graph_terms(
                size,
                slots=options.max_slots,
                context_tokens=options.max_context_tokens,
                piece=options.prefill_chunk_tokens,
                item=item,
                kernels=options.kernels,
            )
        return [*terms, Term("activations", held, f"a pass of {rows:,} rows", False, "prefill_chunk_tokens")]

    def add_request(self, session: str, inputs: Values, settings: Mapping[str, Any]) -> None:
        self._check_room(session)
        messages = inputs.get("messages")
        if not isinstance(messages, str):
            raise InvalidRequest("messages is missing", "send the JSON list of chat messages")
        new = _Session(id=session, conversation=Conversation.parse(messages), **self._writing(settings))
        if "transcript" in inputs:
            new.conversation.hear(str(inputs["transcript"]))
        if not new.conversation.missing:
            self._ask(new)
        self._sessions[session] = new

    def push(self, session: str, inputs: Values, last: bool) -> None:
        known = self._sessions.get(session)
        if known is None:
            return
        conversation = known.conversation
        try:
            if "transcript" in inputs:
                conversation.hear(str(inputs["transcript"]))
                if not conversation.missing:
                    self._ask(known)
            if last and conversation.missing:
                raise InvalidRequest(
                    f"{conversation.audio_parts - conversation.missing} transcripts came for the "
                    f"{conversation.audio_parts} audio parts of messages",
                    "attach audio for every audio part",
                )
        except TritoneError as error:
            self._refuse(session, error)

    def _ask(self, session: _Session) -> None:
        """Let a session with a complete conversation wait for a slot."""
        messages = session.conversation.messages(self._options.system_prompt)
        self._ready(session, self._tokenizer.prompt(messages))
