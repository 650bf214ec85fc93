"""Records, levels and documents made by hand."""

from tritone_bench.arrivals import Load
from tritone_bench.client_cost import ClientCost
from tritone_bench.document import SCHEMA, Document, PlanFacts, RequestSetFacts
from tritone_bench.environment import Environment, ServerFacts
from tritone_bench.level import LevelReport, summarize
from tritone_bench.load import LevelRun
from tritone_bench.playback import Arrival
from tritone_bench.record import Failure, RequestRecord

COST = ClientCost(cpu_share=0.05, loop_lag_p99_s=0.001, load_average=0.5)
STAGES = {
    "writer": {
        "opened_at_s": 0.01,
        "ended_at_s": 0.5,
        "total_s": 0.49,
        "first_output_s": 0.05,
        "queued_s": 0.01,
        "busy_s": 0.3,
        "busy": [[0.02, 0.2], [0.3, 0.42]],
    },
    "wave": {
        "opened_at_s": 0.1,
        "last_output_at_s": 0.9,
        "calls": 2,
        "calls_s": 0.4,
        "busy_s": 0.2,
        "busy": [[0.12, 0.2], [0.7, 0.82]],
        "call_spans": [[0.1, 0.25, 4, 1], [0.65, 0.9, 25, 2]],
    },
}


def record(number: int = 0, e2el_s: float = 1.0, **changes) -> RequestRecord:
    """Text from a tenth of `e2el_s` on, two chunks of a second of sound, the first after a fifth of it."""
    made = {
        "due_s": 0.0,
        "sent_s": 0.0,
        "end_s": e2el_s,
        "text": (e2el_s / 10, e2el_s / 2),
        "audio": (Arrival(e2el_s / 5, 1.0), Arrival(e2el_s, 1.0)),
        "usage": {"completion_tokens": 5},
        "finish_reasons": {"text": "stop", "audio": "stop"},
    }
    return RequestRecord(number, **{**made, **changes})


def failed(number: int = 0, code: str = "UNAVAILABLE", message: str = "busy; later") -> RequestRecord:
    return RequestRecord(number, due_s=0.0, sent_s=0.0, end_s=0.1, failure=Failure(code, message))


def level(
    records, load: Load | None = None, repeat: int = 0, wall_s: float = 10.0, bounds=None
) -> LevelReport:
    run = LevelRun(tuple(records), wall_s, COST)
    return summarize(load or Load(concurrency=1), repeat, run, bounds)


def document(levels, digest: str = "d1", **plan) -> Document:
    facts = {
        "consume": "fast",
        "duration_s": None,
        "num_warmup_requests": 1,
        "num_repeats": 1,
        "delivery": {},
    }
    return Document(
        schema=SCHEMA,
        environment=Environment(
            command="tritone bench fake",
            date="2026-01-01T00:00:00+00:00",
            versions={"python": "3.11.2"},
            system="Linux x86_64",
            cpu="a CPU",
            num_cores=2,
            memory_bytes=2**33,
            load_average=0.5,
        ),
        server=ServerFacts(
            url="127.0.0.1:8001",
            pipeline="fake",
            deploy_digest="abc",
            contract_version=1,
            modalities=("text", "audio"),
            sample_rate_hz=16_000,
            limits={"max_in_flight": 8},
        ),
        plan=PlanFacts(**{**facts, **plan}),
        request_set=RequestSetFacts("built-in questions", digest, 16, 24, 0, {"max_tokens": 9}),
        levels=tuple(levels),
    )
