"""One level of load, summed up.

Percentiles are over the requests that were answered, of gap and ITL over those of all answers together;
throughput is over the wall time from the first request to the last end. By output modality: `request` holds
what every answer has, `text` and `audio` what those have that wrote or spoke.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritone_bench.arrivals import Load
from tritone_bench.client_cost import ClientCost
from tritone_bench.goodput import Goodput, goodput
from tritone_bench.load import LevelRun
from tritone_bench.percentiles import Spread, percentile, spread
from tritone_bench.playback import Arrival
from tritone_bench.record import Figures, RequestRecord
from tritone_bench.stages import StageReport, chain_overhead, report_stages


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """How often requests failed in one way."""

    count: int
    example: str  # the message of one of them


@dataclass(frozen=True, slots=True)
class Throughput:
    """What was made in a second of the level, by answers that were completed."""

    requests_per_s: float
    text_tokens_per_s: float
    audio_s_per_s: float


@dataclass(frozen=True, slots=True)
class Underruns:
    """What listeners heard who played each answer while it arrived."""

    num_streams: int  # answers with sound in two chunks or more
    num_single_chunk: int  # answers with all their sound in one, which cannot run out
    num_clean: int  # streams without any underrun
    share_clean: float | None  # of the streams
    num_underruns: int
    silence_s: float  # of all of them together
    silence_per_stream_s: Spread | None


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer in full, to be drawn. Times are seconds after the request was sent."""

    number: int  # of the request
    text: tuple[float, ...]  # each delta
    audio: tuple[Arrival, ...]  # each chunk
    end_s: float
    timings: dict[str, Any]  # what the server said of its stages


@dataclass(frozen=True, slots=True)
class LevelReport:
    """One level of load, run once."""

    load: Load
    repeat: int  # counted from 0
    num_requests: int
    num_errors: int
    wall_s: float
    throughput: Throughput
    measures: dict[str, dict[str, Spread]]  # by modality, then by measure, e.g. ["audio"]["ttfp_s"]
    underruns: Underruns
    goodput: Goodput | None
    errors: dict[str, ErrorCount]  # by code
    finish_reasons: dict[str, dict[str, int]]  # by modality, then by reason
    stages: dict[str, StageReport]
    chain_overhead_p50_s: float | None  # per chunk of sound; None where the server does not say it
    late_p99_s: float | None  # how long after they were due requests were sent: the client's own delay
    client: ClientCost
    requests: tuple[Figures, ...]  # by number
    streams: dict[str, Stream]  # "typical": of median E2EL; "worst": with the most silence

    def measure(self, modality: str, name: str) -> Spread | None:
        return self.measures.get(modality, {}).get(name)


def summarize(
    load: Load, repeat: int, run: LevelRun, bounds: Mapping[str, float] | None = None
) -> LevelReport:
    """Sum up a level. bounds: of the goodput."""
    records = sorted(run.records, key=lambda record: record.number)
    answered = [record for record in records if record.failure is None]
    figures = [record.figures() for record in records]
    good = [one for one in figures if one.failure is None]
    return LevelReport(
        load=load,
        repeat=repeat,
        num_requests=len(records),
        num_errors=len(records) - len(answered),
        wall_s=run.wall_s,
        throughput=Throughput(
            requests_per_s=len(good) / run.wall_s,
            text_tokens_per_s=sum(one.num_tokens or 0 for one in good) / run.wall_s,
            audio_s_per_s=sum(one.audio_s for one in good) / run.wall_s,
        ),
        measures=_measures(answered, good),
        underruns=_underruns(good),
        goodput=goodput(figures, bounds or {}, run.wall_s),
        errors=_errors(records),
        finish_reasons=_finish_reasons(answered),
        stages=report_stages(answered),
        chain_overhead_p50_s=chain_overhead(answered),
        late_p99_s=percentile([record.sent_s - record.due_s for record in records], 99),
        client=run.cost,
        requests=tuple(figures),
        streams=_streams(answered),
    )


def _measures(answered: Sequence[RequestRecord], good: Sequence[Figures]) -> dict[str, dict[str, Spread]]:
    spreads = {
        "request": {"e2el_s": spread(one.e2el_s for one in good)},
        "text": {
            "ttft_s": spread(one.ttft_s for one in good),
            "tpot_s": spread(one.tpot_s for one in good),
            "itl_s": spread(gap for record in answered for gap in record.itl_s),
            "e2el_s": spread(one.text_e2el_s for one in good),
        },
        "audio": {
            "ttfp_s": spread(one.ttfp_s for one in good),
            "gap_s": spread(gap for record in answered for gap in record.gaps_s),
            "rtf": spread(one.rtf for one in good),
            "e2el_s": spread(one.audio_e2el_s for one in good),
            "leading_silence_s": spread(one.leading_silence_s for one in good),
        },
        **{
            medium: {"e2el_s": spread(one.media_e2el_s.get(medium) for one in good)}
            for medium in ("image", "video")
        },
    }
    told = {
        modality: {name: value for name, value in by_name.items() if value is not None}
        for modality, by_name in spreads.items()
    }
    return {modality: by_name for modality, by_name in told.items() if by_name}


def _underruns(good: Sequence[Figures]) -> Underruns:
    streams = [one for one in good if one.underrun_s is not None]
    silences_s = [one.underrun_s for one in streams if one.underrun_s is not None]
    num_clean = sum(not one.num_underruns for one in streams)
    return Underruns(
        num_streams=len(streams),
        num_single_chunk=sum(one.num_chunks == 1 for one in good),
        num_clean=num_clean,
        share_clean=num_clean / len(streams) if streams else None,
        num_underruns=sum(one.num_underruns for one in streams),
        silence_s=sum(silences_s),
        silence_per_stream_s=spread(silences_s),
    )


def _errors(records: Sequence[RequestRecord]) -> dict[str, ErrorCount]:
    failures = [record.failure for record in records if record.failure is not None]
    counts = Counter(failure.code for failure in failures)
    examples = {failure.code: failure.message for failure in reversed(failures)}
    return {code: ErrorCount(count, examples[code]) for code, count in counts.most_common()}


def _finish_reasons(answered: Sequence[RequestRecord]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for record in answered:
        for modality, reason in record.finish_reasons.items():
            by_reason = counts.setdefault(modality, {})
            by_reason[reason] = by_reason.get(reason, 0) + 1
    return counts


def _streams(answered: Sequence[RequestRecord]) -> dict[str, Stream]:
    if not answered:
        return {}
    by_length = sorted(answered, key=lambda record: record.end_s)
    typical = by_length[(len(by_length) - 1) // 2]
    worst = max(answered, key=lambda record: record.figures().underrun_s or 0.0)
    return {"typical": _stream(typical), "worst": _stream(worst)}


def _stream(record: RequestRecord) -> Stream:
    return Stream(record.number, record.text, record.audio, record.end_s, dict(record.timings))
