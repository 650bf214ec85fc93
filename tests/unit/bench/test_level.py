import pytest
from made import STAGES, failed, level, record

from tritone_bench.playback import Arrival
from tritone_bench.stages import StageReport


def test_a_level_is_summed_up():
    report = level([*(record(n, float(n)) for n in range(1, 101)), failed(101)], wall_s=50.0)
    assert (report.num_requests, report.num_errors) == (101, 1)
    e2el = report.measure("request", "e2el_s")
    assert (e2el.p50, e2el.p90, e2el.p99, e2el.count) == (50.0, 90.0, 99.0, 100)
    assert report.measure("text", "ttft_s").p50 == 5.0
    assert report.measure("text", "tpot_s").p50 == pytest.approx(50 * 0.4 / 4)
    assert report.measure("audio", "ttfp_s").p99 == pytest.approx(19.8)
    assert report.measure("audio", "rtf").max == 50.0
    assert report.measure("audio", "gap_s").p50 == pytest.approx(40.0)
    throughput = report.throughput
    assert (throughput.requests_per_s, throughput.audio_s_per_s, throughput.text_tokens_per_s) == (
        2.0,
        4.0,
        10.0,
    )
    assert report.finish_reasons == {"text": {"stop": 100}, "audio": {"stop": 100}}
    assert [one.number for one in report.requests] == list(range(1, 102))


def test_gaps_of_all_answers_are_one_sample():
    many = record(0, audio=tuple(Arrival(float(n), 1.0) for n in range(51)))
    few = record(1, audio=tuple(Arrival(3.0 * n, 1.0) for n in range(51)))
    gap = level([many, few]).measure("audio", "gap_s")
    assert (gap.count, gap.min, gap.max, gap.p50, gap.p90, gap.too_few) == (100, 1.0, 3.0, 1.0, 3.0, ())


def test_modalities_nobody_asked_for_are_not_there():
    report = level([record(audio=(), finish_reasons={"text": "stop"})])
    assert set(report.measures) == {"request", "text"} and report.measure("audio", "ttfp_s") is None
    assert report.underruns.share_clean is None and report.underruns.num_streams == 0
    pictures = level([record(text=(), audio=(), media={"image": 0.7}, finish_reasons={"image": "stop"})])
    assert pictures.measure("image", "e2el_s").p50 == 0.7


def test_underruns_are_of_streams_that_could_have_them():
    smooth, single = (Arrival(0.3, 1.0), Arrival(0.9, 1.0)), (Arrival(0.3, 1.0),)
    late = (Arrival(0.3, 1.0), Arrival(1.8, 0.1), Arrival(2.0, 1.0))
    underruns = level(
        [record(n, audio=audio) for n, audio in enumerate([smooth, smooth, late, single])]
    ).underruns
    assert (underruns.num_streams, underruns.num_single_chunk, underruns.num_clean) == (3, 1, 2)
    assert (underruns.num_underruns, underruns.silence_s) == (2, pytest.approx(0.6))
    assert underruns.share_clean == pytest.approx(2 / 3)
    assert underruns.silence_per_stream_s.p50 == 0.0 and underruns.silence_per_stream_s.count == 3


def test_errors_are_counted_by_kind_with_the_first_message():
    report = level(
        [failed(0, "UNAVAILABLE", "first"), failed(1, "INTERNAL"), failed(2, "UNAVAILABLE", "second")]
    )
    assert list(report.errors) == ["UNAVAILABLE", "INTERNAL"]
    assert (report.errors["UNAVAILABLE"].count, report.errors["UNAVAILABLE"].example) == (2, "first")
    assert report.measures == {} and report.streams == {} and report.throughput.requests_per_s == 0


def test_the_streams_that_are_kept_are_typical_and_worst():
    worst = record(3, 2.0, audio=(Arrival(0.1, 0.1), Arrival(2.0, 0.1)))
    report = level([record(1, 1.0), record(2, 1.1), worst, record(4, 1.2)])
    assert (report.streams["typical"].number, report.streams["worst"].number) == (2, 3)
    assert report.streams["worst"].audio == worst.audio


def told(stages, audio_chunks=4, idle_s=None):
    """A request whose server told this of its stages."""
    timings = {"total_s": 2.0, "stages": stages} | ({} if idle_s is None else {"idle_s": idle_s})
    return record(timings=timings, audio=tuple(Arrival(float(n), 1.0) for n in range(audio_chunks)))


def test_shares_are_of_the_time_in_which_a_stage_computes():
    report = level(
        [
            told(
                {"thinker": {"total_s": 1.5, "busy_s": 0.5}, "wave": {"calls": 4, "calls_s": 0.3}}, idle_s=0.1
            ),
            told({"thinker": {"total_s": 1.6, "busy_s": 0.6, "first_output_s": 0.25}}, idle_s=0.2),
            told({"thinker": {"total_s": 1.7, "busy_s": 1.0}}, idle_s=0.4),
            told({}, idle_s=9.0, audio_chunks=0),
        ]
    )
    assert report.stages["thinker"] == StageReport(1.6, 0.25, 0.6, 0.3)
    # What a stage does not say of its work is not guessed from how long it was waited for.
    assert report.stages["wave"] == StageReport(0.3, None, None, None)
    assert report.chain_overhead_p50_s == 0.05


def test_stages_with_moments_report_the_same():
    report = level([record(timings={"total_s": 1.0, "stages": STAGES})])
    assert report.stages["writer"] == StageReport(0.49, 0.05, 0.3, 0.3)
    assert report.stages["wave"] == StageReport(0.4, None, 0.2, 0.2)
    assert report.chain_overhead_p50_s is None


def test_stages_stand_in_the_order_of_their_first_outputs():
    stages = {
        "talker": {"opened_at_s": 0.01, "first_output_at_s": 0.3},
        "wave": {"opened_at_s": 0.4},
        "thinker": {"opened_at_s": 0.02, "first_output_at_s": 0.1},
    }
    assert list(level([record(timings={"stages": stages})]).stages) == ["thinker", "talker", "wave"]
    untold = {"b": {"total_s": 1.0}, "a": {"total_s": 2.0}}
    assert list(level([record(timings={"stages": untold})]).stages) == ["b", "a"]
