"""Pictures and page: what is in them, not how pretty they are."""

import base64
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from made import STAGES, document, failed, level, record

from tritone_bench import page, plots
from tritone_bench.arrivals import Load
from tritone_bench.playback import Arrival
from tritone_client import InvalidRequest

TIMINGS = {"total_s": 1.0, "ttft_s": 0.1, "ttfp_s": 0.2, "stages": STAGES}
LATE = (Arrival(0.2, 0.3), Arrival(0.9, 1.0))
SVG = "{http://www.w3.org/2000/svg}"


def sweep():
    return [
        level(
            [record(0), record(1, 1.2, audio=LATE), record(2, 1.1, timings=TIMINGS)],
            Load(concurrency=number),
            repeat,
        )
        for repeat in range(2)
        for number in (1, 4, 16)
    ]


@pytest.fixture(scope="module")
def drawings():
    return {drawing.name: drawing for drawing in plots.draw(sweep())}


def legend_of(figure):
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [text.get_text() for legend in legends if legend for text in legend.get_texts()]


def test_every_axis_says_its_unit(drawings):
    assert list(drawings) == ["latency", "throughput", "ttfp", "timeline", "gantt"]
    for drawing in drawings.values():
        for axes in drawing.figure.axes:
            if axes.get_visible():
                assert re.search(r"\bs\b|/s|\d requests|requests at a time|seconds", axes.get_xlabel()), (
                    drawing
                )
                named = axes.get_ylabel() or [label.get_text() for label in axes.get_yticklabels()]
                assert named, drawing


def test_every_line_is_in_a_legend(drawings):
    assert {"p50", "p90", "p99", "hollow: too few samples"} <= set(legend_of(drawings["latency"].figure))
    assert legend_of(drawings["ttfp"].figure) == [f"concurrency {n} (6 answers)" for n in (1, 4, 16)]
    assert set(legend_of(drawings["timeline"].figure)) == {
        "arrived",
        "heard",
        "a text delta",
        "TTFP",
        "silence heard",
    }
    gantt = legend_of(drawings["gantt"].figure)
    assert sorted(gantt) == ["TTFP", "TTFT", "a call", "computing", "open", "queued"]


def test_lines_differ_in_more_than_colour(drawings):
    lines = [container.lines[0] for container in drawings["latency"].figure.axes[0].containers]
    assert len({line.get_linestyle() for line in lines}) == len({line.get_marker() for line in lines}) == 3
    curves = drawings["ttfp"].figure.axes[0].lines
    assert len({curve.get_linestyle() for curve in curves}) == 3


def test_the_timeline_shades_what_is_silent(drawings):
    typical, worst = drawings["timeline"].figure.axes
    assert "worst stream (request 1): 0.40 s of silence in 1 underrun" in worst.get_title()
    spans = [(patch.get_x(), patch.get_width()) for patch in worst.patches if patch.get_width()]
    assert spans == [(pytest.approx(0.5), pytest.approx(0.4))]
    assert "typical stream (request 2): no underrun" in typical.get_title()


def test_the_gantt_has_a_row_a_stage_in_the_order_of_first_outputs(drawings):
    first = drawings["gantt"].figure.axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == ["writer", "wave"]


def test_nothing_overlaps(drawings):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for drawing in drawings.values():
        canvas = FigureCanvasAgg(drawing.figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        boxes = [axes.get_tightbbox(renderer) for axes in drawing.figure.axes if axes.get_visible()]
        boxes += [legend.get_window_extent(renderer) for legend in drawing.figure.legends]
        shrunk = [box.padded(-1.5) for box in boxes]
        pairs = [(a, b) for number, a in enumerate(shrunk) for b in shrunk[number + 1 :]]
        assert not any(a.overlaps(b) for a, b in pairs), drawing.name


def test_pictures_are_files(drawings, tmp_path):
    paths = plots.save(list(drawings.values()), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [f"{name}.png" for name in drawings]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 5000 for path in paths)
    assert drawings["ttfp"].svg() == drawings["ttfp"].svg(), "the same run gives the same file"


def test_what_there_is_no_figure_for_is_not_drawn():
    text_only = [level([record(audio=(), finish_reasons={"text": "stop"})])]
    assert [drawing.name for drawing in plots.draw(text_only)] == ["latency", "throughput"]
    assert plots.draw([level([failed()])]) == [] and plots.draw([]) == []
    rates = [level([record()], Load(request_rate_per_s=rate, arrival="constant")) for rate in (0.5, 3.0)]
    assert "requests/s, constant" in plots.draw(rates)[0].figure.axes[0].get_xlabel()


class Page(HTMLParser):
    """Which tags are open, and what is fetched from elsewhere."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.links, self.cells = [], [], [], 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.cells += tag == "td"
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                (self.images if tag == "img" else self.links).append(value)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


def test_the_page_is_whole_and_needs_nothing_else(drawings):
    text = page.render(document(sweep()), list(drawings.values()))
    read = Page(text)
    assert read.open == [] and read.links == [] and len(read.images) == 5 and read.cells > 100
    for image in read.images:
        kind, _, data = image.partition(";base64,")
        assert kind == "data:image/svg+xml"
        assert ElementTree.fromstring(base64.b64decode(data)).tag == f"{SVG}svg"
    assert "tritone bench fake" in text and "load average" in text and "digest d1" in text
    assert all(word in text for word in page.DEFINITIONS)


def test_the_page_takes_messages_for_text(drawings):
    text = page.render(document([level([failed(message="<script>alert(1)</script> & more")])]), [])
    assert "<script>" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert "nothing to draw" in text and Page(text).images == []


def test_without_the_libraries_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(page, "NEEDED", ("matplotlib", "no_such_library"))
    with pytest.raises(InvalidRequest, match=r"needs no_such_library; install with pip install '.\[bench\]'"):
        page.check_can_draw()
