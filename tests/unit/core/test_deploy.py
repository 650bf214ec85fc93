"""deploy.yaml: every wrong key or value is named with what to do; overrides win; the digest follows."""

from pathlib import Path

import pytest

from tritone import deploy_reader
from tritone.deploy import Chunks
from tritone.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "model_repository" / "smoltalk" / "deploy.yaml"


def write(tmp_path, text):
    path = tmp_path / "deploy.yaml"
    path.write_text(text)
    return path


def test_the_shipped_file_is_valid_and_caps_bls_below_the_default_thread_pool():
    deploy = deploy_reader.load(SHIPPED)
    assert deploy.pipeline.name == "smoltalk"
    assert deploy.bls_threads < 32
    assert deploy.stage("thinker").model == "smoltalk_thinker"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stages: {}", ["no `pipeline:`"]),
        ("pipeline: smoltok", ["smoltok", "smoltalk"]),
        ("pipeline: smoltalk\nmax_inflight: 3", ["max_inflight", "max_in_flight"]),
        ("pipeline: smoltalk\nmax_in_flight: many", ["max_in_flight", "int"]),
        ("pipeline: smoltalk\nmax_in_flight: 0", ["max_in_flight", "at least 1"]),
        ("pipeline: smoltalk\nmetrics: 9090", ["metrics", "bool"]),
        ("pipeline: smoltalk\nmetric: false", ["metric", "did you mean 'metrics'"]),
        ("pipeline: smoltalk\nmode: async", ["mode is 'async'", "async_chunk or sync"]),
        ("pipeline: smoltalk\nconector: {}", ["conector", "did you mean 'connector'"]),
        ("pipeline: smoltalk\nconnector: {window: 1}", ["connector", "'window'", "window_bytes"]),
        ("pipeline: smoltalk\nconnector: {window_bytes: 0}", ["connector.window_bytes is 0", "at least 1"]),
        ("pipeline: smoltalk\nconnector: {queued_bytes: big}", ["connector", "queued_bytes"]),
        ("pipeline: smoltalk\nurls: {allowed: [a.org]}", ["urls", "'allowed'", "did you mean 'allow'"]),
        ("pipeline: smoltalk\nurls: {allow: a.org}", ["urls", "array"]),
        ("pipeline: smoltalk\nurls: {allow: ['*']}", ["urls.allow has '*'", "*.domain"]),
        ("pipeline: smoltalk\nurls: {allow: [10.0.0.1]}", ["urls.allow has '10.0.0.1'", "names of hosts"]),
        ("pipeline: smoltalk\nurls: {max_bytes: 0}", ["urls.max_bytes is 0", "at least 1"]),
        ("pipeline: smoltalk\nurls: {timeout_s: 0}", ["urls.timeout_s is 0", "at least 0.1"]),
        ("pipeline: smoltalk\nstages: {taker: {}}", ["taker", "talker"]),
        ("pipeline: smoltalk\nstages: {talker: {instnces: 2}}", ["talker", "instnces", "instances"]),
        ("pipeline: smoltalk\nstages: {thinker: {engine: {max_slot: 2}}}", ["max_slot", "max_slots"]),
        ("pipeline: smoltalk\nstages: {thinker: {engine: {kind: vlm}}}", ["vlm", "torch"]),
        ("pipeline: smoltalk\nstages: {thinker: {engine: vlm}}", ["vlm", "torch"]),
        ("pipeline: smoltalk\nstages: {thinker: {engine: [torch]}}", ["engine is ['torch']", "mapping"]),
        ("pipeline: smoltalk\nstages: {thinker: {sampling: {temperature: hot}}}", ["temperature", "hot"]),
        ("pipeline: smoltalk\nstages: {code2wav: {sampling: {seed: 1}}}", ["does not sample"]),
        ("pipeline: smoltalk\nstages: {ears: {device: tpu}}", ["tpu", "gpu:<number>"]),
        ("pipeline: smoltalk\nchunks: {frames: 3}", ["chunks", "frames", "codec_chunk_frames"]),
        ("pipeline: smoltalk\nchunks: {codec_chunk_growth: 0.5}", ["codec_chunk_growth", "0.5", "0 or 1"]),
        ("pipeline: smoltalk\nchunks: {codec_chunk_growth: .nan}", ["codec_chunk_growth", "nan"]),
        ("pipeline: smoltalk\nchunks: {codec_chunk_growth: fast}", ["chunks", "float"]),
        ("pipeline: smoltalk\nlimits: {image_bytes: 0}", ["limits.image_bytes", "at least 1"]),
        ("pipeline: smoltalk\nlimits: {video_bytes: 0}", ["limits.video_bytes", "at least 1"]),
        ("pipeline: smoltalk\nlimits: {image_pixels: 0}", ["limits.image_pixels", "at least 1"]),
        ("pipeline: smoltalk\nlimits: {video_s: 0}", ["limits.video_s", "at least 0.1"]),
        ("pipeline: smoltalk\nlimits: {video_seconds: 3}", ["video_seconds", "video_s"]),
        ("pipeline: [", ["not YAML"]),
        (
            "pipeline: smoltalk\nstages: {talker: {colocate: s}, code2wav: {colocate: s, instances: 2}}",
            ["talker", "code2wav", "instances"],
        ),
    ],
)
def test_wrong_files_are_refused_by_key(tmp_path, text, words):
    with pytest.raises(ConfigError) as refusal:
        deploy_reader.load(write(tmp_path, text))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert refusal.value.cure


def test_growth_and_limits_are_read_and_have_defaults(tmp_path):
    text = "pipeline: smoltalk\nchunks: {codec_chunk_growth: 2}\nlimits: {video_s: 10, image_pixels: 100}"
    deploy = deploy_reader.load(write(tmp_path, text))
    assert deploy.chunks == Chunks(4, 25, 2.0)
    assert (deploy.limits.video_s, deploy.limits.image_pixels) == (10.0, 100)
    assert (deploy.limits.image_bytes, deploy.limits.video_bytes) == (32 << 20, 256 << 20)
    assert deploy_reader.load(write(tmp_path, "pipeline: smoltalk")).chunks.codec_chunk_growth == 0


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        deploy_reader.load(tmp_path / "deploy.yaml")


def test_overrides_win_and_change_the_digest():
    plain = deploy_reader.load(SHIPPED)
    more = deploy_reader.load(SHIPPED, ["stage.thinker.engine.max_slots=3", "max_in_flight=5"])
    assert more.stage("thinker").options.max_slots == 3 and more.max_in_flight == 5
    assert (
        plain.digest
        != more.digest
        == deploy_reader.load(SHIPPED, ["max_in_flight=5", "stage.thinker.engine.max_slots=3"]).digest
    )


@pytest.mark.parametrize("text", ["max_in_flight", "=3", "max_in_flight.x=3"])
def test_malformed_overrides_are_refused(text):
    with pytest.raises(ConfigError, match="override"):
        deploy_reader.load(SHIPPED, [text])


def test_colocated_stages_share_a_process():
    deploy = deploy_reader.load(SHIPPED, ["stage.talker.colocate=speech", "stage.code2wav.colocate=speech"])
    assert deploy.hosted_with("code2wav") == ("talker", "code2wav")
    assert deploy.hosted_with("ears") == ("ears",)
    assert deploy.engine_group("code2wav") == deploy.engine_group("talker") != deploy.engine_group("ears")


@pytest.mark.parametrize(
    ("key", "value"), [("device", "gpu:1"), ("python", "/opt/other/bin/python"), ("env", "{A: b}")]
)
def test_colocated_stages_have_one_device_and_one_interpreter(key, value):
    together = ["stage.talker.colocate=speech", "stage.code2wav.colocate=speech"]
    with pytest.raises(ConfigError, match=f"talker and code2wav share a process but differ in {key}"):
        deploy_reader.load(SHIPPED, [*together, f"stage.code2wav.{key}={value}"])


def test_an_engine_has_variables_of_its_own():
    deploy = deploy_reader.load(
        SHIPPED, ["stage.talker.env={PYTORCH_ALLOC_CONF: 'expandable_segments:True'}"]
    )
    assert deploy.stage("talker").env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert deploy.stage("thinker").env == {}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{OMP_NUM_THREADS: '2'}", r"stages\.talker\.env has OMP_NUM_THREADS.*threads"),
        ("{CUDA_VISIBLE_DEVICES: '1'}", r"stages\.talker\.env has CUDA_VISIBLE_DEVICES.*device"),
        ("{A: 1}", r"stages\.talker: Expected `str`, got `int`.*env"),
    ],
)
def test_variables_that_cannot_be_are_refused(value, said):
    with pytest.raises(ConfigError, match=said):
        deploy_reader.load(SHIPPED, [f"stage.talker.env={value}"])


def test_a_runtime_that_measures_the_gpu_is_the_first_of_its_process(tmp_path, monkeypatch):
    source = Path(__file__).parents[2] / "pipelines" / "echo.py"
    shared = "{device: gpu, colocate: all}"
    file = write(tmp_path, f"pipeline: {source}\nstages: {{writer: {shared}, singer: {shared}}}")
    deploy = deploy_reader.load(file)
    monkeypatch.setattr(deploy.engine_class("writer"), "leaves_default_stream", True)
    deploy_reader.load(file)
    monkeypatch.setattr(deploy.engine_class("singer"), "leaves_default_stream", True)
    with pytest.raises(ConfigError, match=r"writer and singer share a process, .* must be the first there"):
        deploy_reader.load(file)


def test_a_pipeline_may_come_from_a_file_beside_the_deploy_file(tmp_path):
    source = Path(__file__).parents[2] / "pipelines" / "echo.py"
    deploy = deploy_reader.load(write(tmp_path, f"pipeline: {source}"))
    assert deploy.pipeline.name == "echo"
    with pytest.raises(ConfigError, match=r"nothere\.py"):
        deploy_reader.load(write(tmp_path, "pipeline: nothere.py"))


def test_the_connector_and_the_mode_have_defaults_and_are_read():
    plain = deploy_reader.load(SHIPPED)
    assert (plain.mode, plain.connector.window_bytes, plain.connector.queued_bytes) == (
        "async_chunk",
        32 << 20,
        256 << 20,
    )
    given = deploy_reader.load(SHIPPED, ["mode=sync", "connector.window_bytes=4096"])
    assert (given.mode, given.connector.window_bytes, given.connector.queued_bytes) == (
        "sync",
        4096,
        256 << 20,
    )
    assert given.digest != plain.digest
