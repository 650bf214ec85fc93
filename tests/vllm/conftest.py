"""The Thinker on vLLM and the torch Thinker, on one checkpoint, in one process. Run by `make test-vllm`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import qwen3_omni_tiny

from thinkers import CASES, Answer, Conversations, start
from tritone.checkpoint import checkpoint_dir
from tritone.engines.base import Placement
from tritone.pipelines.qwen3_omni.thinker import Thinker, ThinkerOptions


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    qwen3_omni_tiny.main(["--wide"])
    return checkpoint_dir(qwen3_omni_tiny.WIDE)


@pytest.fixture(scope="session")
def torch_thinker(checkpoint: Path) -> Conversations:
    options = ThinkerOptions(max_slots=12, max_context_tokens=1024, prefill_chunk_tokens=64)
    return Conversations(Thinker(Placement(checkpoint), options))


@pytest.fixture(scope="session")
def expected(torch_thinker: Conversations) -> dict[str, Answer]:
    """What the torch Thinker answers to each case."""
    return {name: torch_thinker.one(name, case) for name, case in CASES.items()}


@pytest.fixture(scope="session")
def roomy(checkpoint: Path) -> Iterator[Conversations]:
    """Room for all cases at once, prefix caching on."""
    engine = start(checkpoint)
    yield Conversations(engine)
    engine.close()


@pytest.fixture(scope="session")
def tight(checkpoint: Path) -> Iterator[Conversations]:
    """Prompts in chunks of 16 tokens, and a cache that four answers overflow."""
    engine = start(
        checkpoint,
        {"block_size": 32, "num_gpu_blocks_override": 17},
        max_slots=4,
        max_context_tokens=448,
        prefill_chunk_tokens=12,
    )
    yield Conversations(engine)
    engine.close()
