"""What the host does for a frame of the talker beside the GPU's work, measured without a GPU.

    python client/bench/gpu/talker_host.py --sessions 1,16,64
    python client/bench/gpu/talker_host.py --sessions 64 --profile

    StageLoop ─► Talker: rows packed, launched, heard ─► pieces ─► socket ─► a reader

The talker is a tiny one, whose graphs do nothing: codes are drawn by numpy. What is left is Python and small
operations of torch: processor time of the loop's thread.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), *(str(ROOT / name) for name in ("backends", "client", "client/bench", "build"))]

from comparison.checkpoint_folder import checkpoint_folder  # noqa: E402
from tritone import wire  # noqa: E402
from tritone.connectors.base import Budget  # noqa: E402
from tritone.connectors.local import LocalConnector  # noqa: E402
from tritone.deploy import ConnectorLimits  # noqa: E402
from tritone.engines.base import Placement  # noqa: E402
from tritone.engines.peers import Peers  # noqa: E402
from tritone.engines.stage_loop import StageLoop  # noqa: E402
from tritone.pipelines.qwen3_omni.talker import Talker, TalkerOptions  # noqa: E402

MODEL, PRODUCER = "talker", "thinker"
PROMPT_TOKENS, WARM_FRAMES = 12, 8


class HostTalker(Talker):
    """Its frames are captured, and the captured programs replaced by nothing."""

    @staticmethod
    def _has_graphs(placement: Placement, options: TalkerOptions) -> bool:
        return True

    def stub(self) -> None:
        frames: Any = self._frames
        made, chance = frames._buffers.frames, np.random.RandomState(0)
        codes = chance.randint(0, 8, (97, *made.shape))
        numbers = iter(range(1 << 40))

        def replay() -> None:
            made.numpy()[:] = codes[next(numbers) % len(codes)]

        def nothing() -> None:
            """The rows of a prompt are in the cache."""

        frames._replays = dict.fromkeys(frames._replays, replay)
        prompts: Any = self._prompts
        prompts._replays = dict.fromkeys(prompts._replays, nothing)


def settings(number: int, frames: int) -> dict[str, Any]:
    limits = {"max_tokens": frames + 1, "min_tokens": frames + 1}
    drawn = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05, "seed": number}
    return {"sampling": {**drawn, **limits}}


@contextmanager
def inbox() -> Iterator[str]:
    """Reads everything that comes, in this process's other threads."""
    address = f"tritone-bench/{uuid.uuid4().hex}"
    server = wire.listen(address)

    def read() -> None:
        channel = wire.accept(server)
        try:
            while True:
                channel.receive()
        except wire.Disconnected:
            pass

    threading.Thread(target=read, daemon=True).start()
    yield address
    server.close()


def measured(talker: HostTalker, sessions: int, frames: int, profile: cProfile.Profile | None) -> list[float]:
    """Processor time of the loop's thread for each frame of all sessions, in ms."""
    with inbox() as address:
        peers = Peers("tritone-bench/nobody", lambda lost: None, lambda late: None)
        peers.ensure(address)
        connector = LocalConnector(peers.own_address, MODEL, ConnectorLimits(), Budget(1 << 28))
        loop = StageLoop(MODEL, talker, peers, connector, 600.0)
        names = [uuid.uuid4().hex for _ in range(sessions)]
        for number, name in enumerate(names):
            loop.open(opened(name, address, settings(number, frames)), lambda answer: None)
            for inputs in talker_inputs(talker, frames):
                loop._push(name, inputs, False)
        times: list[float] = []
        spent = 0.0
        texts = text_pieces(talker)
        while any(name in loop._seats for name in names):
            began_s = time.thread_time()
            if profile is not None and len(times) > WARM_FRAMES:
                profile.enable()
            steps = talker._counts["steps"]
            if steps % 5 in (0, 2) and len(times) > WARM_FRAMES:  # 100 tokens of a thinker to 250 frames
                for name in names:
                    loop._push(name, next(texts), False)
            loop._turn()
            if profile is not None:
                profile.disable()
            spent += time.thread_time() - began_s
            if talker._counts["steps"] > steps:
                times.append(1000 * spent)
                spent = 0.0
        return times[WARM_FRAMES:-2]


def opened(name: str, address: str, given: dict[str, Any]) -> wire.Open:
    route = wire.Route(address, "", {"frames": "frames"})
    return wire.Open(1, MODEL, name, address, {}, 1, {**given, "speaker": None}, [route])


def talker_inputs(talker: Talker, frames: int) -> Iterator[dict[str, Any]]:
    """A prompt, and more text than the frames so far need."""
    ids, chance = talker._config.tokens, np.random.RandomState(0)
    prompt = [ids.im_start, ids.user, *chance.randint(10, 200, PROMPT_TOKENS), ids.im_end]
    text = [ids.im_start, 77, 198, *chance.randint(10, 200, frames)]
    yield {"prompt_ids": np.array(prompt, np.int32), "token_ids": np.array(text, np.int32)}


def text_pieces(talker: Talker) -> Iterator[dict[str, Any]]:
    """A token each, as a thinker tells them."""
    chance = np.random.RandomState(1)
    while True:
        yield {"token_ids": chance.randint(10, 200, 1).astype(np.int32)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", default="1,16,64")
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="which functions take it")
    arguments = parser.parse_args(argv)
    sizes = [int(size) for size in arguments.sessions.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_folder(Path(scratch) / "checkpoint", tiny=True)
        options = TalkerOptions(
            max_slots=max(sizes),
            max_context_tokens=256,
            prefill_chunk_tokens=64,
            load_format="dummy",
            max_looped_frames=100,
            kernels=False,
        )
        talker = HostTalker(Placement(folder), options)
        talker.stub()
        for size in sizes:
            profile = cProfile.Profile() if arguments.profile else None
            times = sorted(measured(talker, size, arguments.frames, profile))
            print(
                f"sessions {size:2d}: {statistics.median(times):.2f} ms of processor time a frame "
                f"(10 %: {times[len(times) // 10]:.2f}, 90 %: {times[9 * len(times) // 10]:.2f})",
                flush=True,
            )
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(22)
    return 0


if __name__ == "__main__":
    sys.exit(main())
