"""What `/metrics` says after requests of every kind, against what their clients saw: each count exactly."""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest
from prometheus_tools import installed_tools

from tritone import doctor
from tritone_client import AudioChunk, Done, TextDelta, TritoneError
from waiting import PATIENCE_S

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
LIMIT = 8
SETTLE_S = 2 * PATIENCE_S
SAMPLE = re.compile(r"^(tritone_\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def server(serve):
    return serve("fake", overrides=[f"max_in_flight={LIMIT}"])


@pytest.fixture(scope="module")
def metrics_url(server):
    return json.loads((server.folder / "ready.json").read_text())["metrics"]


def scrape(url):
    """By series as (name, sorted label pairs) its value; histograms by their counts and sums."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    found = {}
    for name, labels, value in SAMPLE.findall(text):
        found[name, tuple(sorted(re.findall(r'(\w+)="([^"]*)"', labels)))] = float(value)
    return found


def total(found, name, **labels):
    """The sum of all series of a name that have these labels."""
    wanted = set(labels.items())
    return sum(value for (its, pairs), value in found.items() if its == name and wanted <= set(pairs))


async def settled(url, condition, what):
    """The scrape at which the condition holds, waited for: values are published once a second."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = await asyncio.to_thread(scrape, url)
        if condition(found):
            return found
        assert time.monotonic() < deadline, f"{what}: {found}"
        await asyncio.sleep(0.1)


class Seen:
    """What the clients of some requests saw, in the words of the families."""

    def __init__(self):
        self.counts = Counter()
        self.sums = Counter()

    def end(self, streamed, outcome, code):
        self.counts["requests", streamed, outcome, code] += 1

    def firsts(self, streamed, has_text, has_audio):
        self.counts["ttft", streamed] += has_text
        self.counts["ttfp", streamed] += has_audio

    def ends(self, streamed, done, num_tokens, audio_s):
        for modality in done["finish_reason"]:
            self.counts["e2el", streamed, modality] += 1
        self.counts["rtf", streamed] += audio_s > 0
        self.counts["tpot", streamed] += num_tokens > 1 and "text" in done["finish_reason"]
        self.sums["e2el_s", streamed] += done["e2el_s"]

    def work(self, tokens, frames, audio_s):
        self.sums["tokens"] += tokens
        self.sums["frames"] += frames
        self.sums["audio_s"] += audio_s


def shown(found, before):
    """The same of `/metrics`, since the scrape before."""

    def grown(name, **labels):
        return total(found, f"tritone_{name}", pipeline="fake", **labels) - total(
            before, f"tritone_{name}", pipeline="fake", **labels
        )

    counts = Counter()
    for name, pairs in found:
        labels = dict(pairs)
        if name == "tritone_requests_total":
            key = {key: labels[key] for key in ("streamed", "outcome", "code")}
            counts["requests", *key.values()] = round(grown("requests_total", **key))
    for streamed in ("true", "false"):
        for family in ("ttft_seconds", "ttfp_seconds", "tpot_seconds", "rtf_ratio", "chunk_gap_seconds"):
            word = family.rpartition("_")[0]
            counts[word, streamed] = round(grown(f"{family}_count", streamed=streamed))
        for modality in ("text", "audio"):
            labels = {"streamed": streamed, "modality": modality}
            counts["e2el", streamed, modality] = round(grown("e2el_seconds_count", **labels))
    sums = {
        "tokens": grown("text_tokens_total", direction="out"),
        "frames": grown("codec_frames_total"),
        "audio_s": grown("audio_seconds_total"),
    }
    return +counts, sums


async def stream(client, seen, prompt, *, leave=None, **options):
    """One streamed request; `leave` after text and sound were heard, once it is set."""
    tokens = texts = chunks = samples = 0
    outcome, code = "cancelled", "CANCELLED"
    try:
        async with aclosing(client.stream(prompt, **options)) as events:
            async for event in events:
                match event:
                    case TextDelta():
                        tokens, texts = tokens + len(event.text.split()), texts + 1
                    case AudioChunk():
                        chunks += 1
                        samples += len(event.samples)
                    case Done():
                        reasons = event.finish_reasons
                        outcome, code = "deadline" if "deadline" in reasons.values() else "ok", "OK"
                        tokens = event.usage.get("completion_tokens", tokens)
                        done = {"finish_reason": reasons, "e2el_s": event.measured.e2el_s}
                if leave is not None and texts and chunks:
                    leave.heard()
                    await leave.wait()
                    break
    except TritoneError as error:
        code = error.code
        refused = code == "INVALID_ARG" or (code == "UNAVAILABLE" and "max_in_flight" in str(error))
        outcome = "deadline" if code == "DEADLINE_EXCEEDED" else "refused" if refused else "failed"
    seen.end("true", outcome, code)
    seen.firsts("true", texts > 0, chunks > 0)
    if leave is None:
        seen.counts["chunk_gap", "true"] += max(chunks - 1, 0)
        seen.work(tokens, samples // 320, samples / 16000)
    if outcome == "ok":
        seen.ends("true", done, tokens, samples / 16000)


class Leave:
    """A door that `count` listeners reach, and that lets all of them out at once."""

    def __init__(self, count):
        self.all_heard, self._open, self._left = asyncio.Event(), asyncio.Event(), count

    def heard(self):
        self._left -= 1
        if not self._left:
            self.all_heard.set()

    async def wait(self):
        await self._open.wait()

    def open(self):
        self._open.set()


async def whole(server, seen, model, prompt, outcome="ok", code="OK", modalities="text,audio"):
    """One request over HTTP that is not streamed: `/generate`, or `/infer` of the twin."""
    began = time.monotonic()
    values = {"text_input": prompt, "modalities": modalities}
    if model.endswith("_sync"):
        inputs = [{"name": k, "datatype": "BYTES", "shape": [1], "data": [v]} for k, v in values.items()]
        status, body = await asyncio.to_thread(post, server, f"{model}/infer", {"inputs": inputs})
        outputs = {o["name"]: o["data"] for o in body.get("outputs", [])}
    else:
        status, body = await asyncio.to_thread(post, server, f"{model}/generate", values)
        outputs = {name: value if isinstance(value, list) else [value] for name, value in body.items()}
    assert (status == 200) == (outcome == "ok"), body
    seen.end("false", outcome, code)
    if outcome != "ok":
        assert f"TRITONE_{code}" in body["error"]
        return
    done = {"finish_reason": json.loads(outputs["finish_reason"][0]), "e2el_s": time.monotonic() - began}
    usage = json.loads(outputs["info"][0])["usage"]
    audio_s = len(outputs.get("audio_output", [])) / 16000
    seen.firsts("false", "text" in done["finish_reason"], audio_s > 0)
    seen.ends("false", done, usage["completion_tokens"], audio_s)
    seen.work(usage["completion_tokens"], usage.get("codec_frames", 0), audio_s)


def post(server, path, body):
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=3 * PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def at_most(count, works):
    turns = asyncio.Semaphore(count)

    async def one(work):
        async with turns:
            await work

    await asyncio.gather(*map(one, works))


async def test_fifty_mixed_requests_are_counted_as_their_clients_saw_them(server, metrics_url):
    before, seen, left = scrape(metrics_url), Seen(), Seen()
    async with server.client("fake") as client:
        await client.ping(PATIENCE_S)  # is no request
        await at_most(
            LIMIT // 2,  # the whole ones among them count against the same limit
            [
                *(stream(client, seen, f"words={n} pace_ms=1") for n in range(1, 9)),
                *(stream(client, seen, "quite short", modalities="text") for _ in range(3)),
                stream(client, seen, "heard only", modalities="audio"),
                *(whole(server, seen, "fake", f"words={n} pace_ms=1") for n in (1, 5, 9)),
                *(whole(server, seen, "fake_sync", f"words={n} pace_ms=1") for n in (2, 6)),
                whole(server, seen, "fake_sync", "text alone", modalities="text"),
                *(stream(client, seen, "hello pase_ms=3") for _ in range(4)),
                whole(server, seen, "fake_sync", "hello pase_ms=3", "refused", "INVALID_ARG"),
                stream(client, seen, "hello", parameters={"not_known": 1}),
                *(stream(client, seen, f"words=9 fail={stage}") for stage in ("writer", "singer") * 2),
                whole(server, seen, "fake", "words=9 fail=writer", "failed", "INTERNAL"),
                stream(client, seen, "stall=writer", parameters={"deadline_ms": 300}),
                stream(
                    client, seen, "words=99 pace_ms=20", modalities="text", parameters={"deadline_ms": 300}
                ),
            ],
        )
        assert seen.counts["requests", "true", "ok", "OK"] == 12
        num_mixed = sum(n for (what, *_), n in seen.counts.items() if what == "requests")
        # A scrape may fall between two series of one turn, so that all of them are waited for.
        found = await settled(
            metrics_url, lambda now: shown(now, before)[0] == +seen.counts, f"not counted: {+seen.counts}"
        )
        counts, sums = shown(found, before)
        assert counts == +seen.counts
        assert sums == pytest.approx({key: seen.sums[key] for key in sums})
        for streamed in ("true", "false"):
            longest_s = total(found, "tritone_e2el_seconds_sum", streamed=streamed, modality="audio")
            assert 0 < longest_s < seen.sums["e2el_s", streamed]

        leave = Leave(LIMIT)
        prompt = "words=20000 pace_ms=20"
        listeners = [asyncio.create_task(stream(client, left, prompt, leave=leave)) for _ in range(LIMIT)]
        async with asyncio.timeout(3 * PATIENCE_S):
            await leave.all_heard.wait()
        await asyncio.gather(*(stream(client, left, "no room") for _ in range(11)))
        held = await settled(
            metrics_url,
            lambda now: total(now, "tritone_stage_sessions", stage="writer") == LIMIT,
            "not all are in the stage",
        )
        assert total(held, "tritone_requests_in_flight", model="fake") == LIMIT
        assert total(held, "tritone_requests_in_flight_limit", model="fake") == LIMIT
        leave.open()
        await asyncio.gather(*listeners)
    assert num_mixed + LIMIT + 11 == 50
    together = seen.counts + left.counts

    def agrees(now):
        counts, _ = shown(now, before)
        return all(key[0] == "chunk_gap" or count == together[key] for key, count in counts.items())

    await settled(metrics_url, ended(before, 50), "not all are counted")
    found = await settled(metrics_url, agrees, f"not counted: {together}")
    counts, _ = shown(found, before)
    assert left.counts["requests", "true", "refused", "UNAVAILABLE"] == 11
    for key, count in counts.items():
        assert key[0] == "chunk_gap" or count == together[key], key
    idle = await settled(
        metrics_url, lambda now: total(now, "tritone_stage_sessions") == 0, "sessions are left"
    )
    assert total(idle, "tritone_requests_in_flight") == total(idle, "tritone_requests_queued") == 0


def ended(before, count):
    def is_reached(found):
        name = "tritone_requests_total"
        return total(found, name) - total(before, name) >= count

    return is_reached


async def test_a_killed_engine_counts_as_a_restart_and_its_counters_go_on(server, metrics_url):
    async with server.client("fake") as client:
        await client.ask("words=20 pace_ms=0")
        name, stage = "tritone_stage_batched_total", {"stage": "singer", "instance": "cpu/0"}
        before = await settled(metrics_url, lambda now: total(now, name, **stage) >= 20, "nothing is counted")
        seen = Seen()
        await stream(client, seen, "words=9 kill=singer@2")
        assert seen.counts["requests", "true", "failed", "UNAVAILABLE"] == 1
        restarts = "tritone_engine_restarts_total"
        after = await settled(
            metrics_url,
            lambda now: total(now, restarts, **stage) == total(before, restarts, **stage) + 1,
            "no restart is counted",
        )
        assert total(after, restarts) == total(before, restarts) + 1
        await settled(metrics_url, lambda now: total(now, "tritone_engine_up", **stage) == 1, "it stays down")
        await client.ask("words=7 pace_ms=0")
        done = await settled(
            metrics_url, lambda now: total(now, name, **stage) >= total(before, name, **stage) + 7, "lost"
        )
        assert total(done, name, **stage) <= total(before, name, **stage) + 20 + 9 + 7


def test_prometheus_scrapes_it_with_the_configuration_of_docker(server, metrics_url, tmp_path):
    """Types, help and names please its linter, and every family that has values is there to be asked for."""
    tools = installed_tools()
    if tools is None:
        pytest.skip("there is no `prometheus` on PATH or in the cache: python build/prometheus_tools.py")
    prometheus, promtool = tools
    config = ROOT / "docker" / "prometheus.yml"
    subprocess.run([promtool, "check", "config", "--syntax-only", config], check=True)
    with urllib.request.urlopen(metrics_url, timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines(keepends=True)
    ours = "".join(line for line in lines if re.match(r"(# \w+ )?tritone_", line))
    linted = subprocess.run(
        [promtool, "check", "metrics"], input=ours, capture_output=True, text=True, timeout=3 * PATIENCE_S
    )
    assert linted.returncode == 0 and linted.stderr + linted.stdout == "", linted.stderr + linted.stdout

    assert post(server, "fake/generate", {"text_input": "hello"})[0] == 200
    with doctor.bind_free("127.0.0.1") as free:
        port = free.getsockname()[1]
    text = config.read_text().replace("tritone:8002", urllib.parse.urlsplit(metrics_url).netloc)
    assert text != config.read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("5s", "1s"))
    url = f"http://127.0.0.1:{port}"
    words = [
        prometheus,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path}/data",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline, result = time.monotonic() + 3 * PATIENCE_S, 0.0
        while not 0 < result == total(scrape(metrics_url), "tritone_requests_total"):
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(OSError):  # it is not up yet
                answers = ask_prometheus(url, "sum(tritone_requests_total)")
                result = float(answers[0]["value"][1]) if answers else 0.0
            time.sleep(0.1)
        for expression in panel_expressions():
            ask_prometheus(url, expression)  # raises where Prometheus does not understand it
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
        shutil.rmtree(tmp_path / "data", ignore_errors=True)


def ask_prometheus(url, query):
    with urllib.request.urlopen(
        f"{url}/api/v1/query?" + urllib.parse.urlencode({"query": query}), timeout=PATIENCE_S
    ) as answer:
        return json.load(answer)["data"]["result"]


def panel_expressions():
    """Of the dashboard, with its variables filled in as Grafana does."""
    dashboard = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "tritone.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield re.sub(r"\$(pipeline|streamed)", ".*", target["expr"].replace("$__rate_interval", "20s"))
