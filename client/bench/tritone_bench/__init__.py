"""Measures a pipeline the way its callers use it: through the public client, stream by stream.

    plan = BenchPlan((Load(concurrency=4),), RequestSet("mine", (Ask("Hello?", {}),), num_requests=32))
    async with AsyncTritoneClient() as client:
        async for report in run_bench(client, plan):
            ...                                    # a LevelReport a level

`tritone bench` is the same as a command. The measures are defined in `record`, underruns in `playback`.
"""

from tritone_bench.arrivals import Load
from tritone_bench.bench import BenchPlan, run_bench
from tritone_bench.level import LevelReport
from tritone_bench.playback import Arrival, Playback, play
from tritone_bench.request_set import Ask, RequestSet

__all__ = [
    "Arrival",
    "Ask",
    "BenchPlan",
    "LevelReport",
    "Load",
    "Playback",
    "RequestSet",
    "play",
    "run_bench",
]
