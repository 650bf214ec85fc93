"""Code2Wav's step as files: exported, held to torch, run by onnxruntime, built and refused by TensorRT."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx  # noqa: E402
import plans  # noqa: E402
import qwen3_omni_tiny  # noqa: E402
from google.protobuf import text_format  # noqa: E402
from tritonclient.grpc import model_config_pb2 as pb  # noqa: E402

from tritone import server as servers  # noqa: E402
from tritone.checkpoint import checkpoint_dir  # noqa: E402
from tritone.deploy import Chunks  # noqa: E402
from tritone.engines.base import Chunk, Placement  # noqa: E402
from tritone.engines.memory import Ground  # noqa: E402
from tritone.errors import ConfigError  # noqa: E402
from tritone.pipelines.qwen3_omni import code2wav_tensorrt, plan_files  # noqa: E402
from tritone.pipelines.qwen3_omni.code2wav import Code2Wav, Code2WavOptions  # noqa: E402
from tritone.pipelines.qwen3_omni.code2wav_exported import ExportedOptions  # noqa: E402
from tritone.pipelines.qwen3_omni.code2wav_onnx import OnnxCode2Wav, check_step  # noqa: E402
from tritone.pipelines.qwen3_omni.code2wav_tensorrt import TensorrtCode2Wav, TensorrtWaves  # noqa: E402
from tritone.pipelines.qwen3_omni.plan_model import plan_model  # noqa: E402
from tritone.pipelines.qwen3_omni.wave_steps import Buckets  # noqa: E402
from tritone.pipelines.qwen3_omni.waves import Share  # noqa: E402

from .test_qwen3_omni_code2wav import assert_only_the_first_ended, chunks_of, sound  # noqa: E402
from .test_waveform_decoder import one_thread  # noqa: E402

__all__ = ["one_thread"]

pytestmark = pytest.mark.weights

BOOKS, BOOK_SIZE, RATE, MISSING = 16, 64, 1920, 555
OPTIONS = ExportedOptions(max_streams=8)


@pytest.fixture(scope="module")
def checkpoint():
    """The tiny one of the cache."""
    qwen3_omni_tiny.main([])
    return checkpoint_dir(qwen3_omni_tiny.PIPELINE)


@pytest.fixture(scope="module")
def exported(checkpoint):
    """With its ONNX file; a run of tests before this one may have left it."""
    before = unfinished(checkpoint)  # of runs that were killed
    plans.write_onnx(checkpoint)
    assert unfinished(checkpoint) <= before
    return checkpoint


def unfinished(checkpoint):
    return set((checkpoint / plan_files.FOLDER).glob(".building-*"))


@pytest.fixture(scope="module")
def engine(exported):
    return OnnxCode2Wav(Placement(exported, max_batch_size=5), OPTIONS)


@pytest.fixture(scope="module")
def whole(checkpoint):
    """whole(frames): their samples in one piece, as torch computes them."""
    torch_engine = Code2Wav(Placement(checkpoint), Code2WavOptions())
    return lambda frames: sound(torch_engine, chunks_of("whole", frames, []))


def random_frames(num_frames, seed=0):
    return np.random.default_rng(seed).integers(0, BOOK_SIZE, (num_frames, BOOKS)).astype(np.int32)


def without_plans(checkpoint, folder):
    """The same weights in a folder of their own."""
    for file in checkpoint.iterdir():
        if file.name != plan_files.FOLDER:
            (folder / file.name).symlink_to(file)
    return folder


# -- the file ------------------------------------------------------------------------------------------------


def test_a_second_run_is_instant_until_something_changes(exported, monkeypatch):
    monkeypatch.setattr(plans, "export", lambda *_: pytest.fail("it was exported again"))
    file = plans.write_onnx(exported)
    before = plans.source_digest(exported)
    assert file.with_suffix(".source").read_text() == before
    monkeypatch.setattr(plans, "OPSET", 17)
    assert plans.source_digest(exported) != before


def test_other_weights_are_exported_anew(checkpoint, tmp_path):
    folder = without_plans(checkpoint, tmp_path)
    weights = min(folder.glob("*.safetensors"))
    assert plans.source_digest(folder) == plans.source_digest(checkpoint)
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-4] + b"\0\0\0\1")
    assert plans.source_digest(folder) != plans.source_digest(checkpoint)


def test_a_file_takes_any_batch_and_any_frames(exported):
    session = onnxruntime.InferenceSession(plan_files.onnx_file(exported))
    shapes = {tensor.name: tensor.shape for tensor in [*session.get_inputs(), *session.get_outputs()]}
    assert tuple(shapes) == (*plan_files.INPUTS, *plan_files.OUTPUTS)
    batch, frames, books = shapes["codes"]
    assert isinstance(batch, str) and isinstance(frames, str) and books == BOOKS
    for name in plan_files.INPUTS:
        assert shapes[name][0] == batch and not isinstance(shapes[name][-1], str)
    assert shapes["memory"] == shapes["memory_out"]


def test_the_file_computes_what_torch_does_sound_and_states(exported):
    decoder = plans.load_decoder(exported)
    assert plans.check(decoder, plan_files.onnx_file(exported)) <= 1e-5


def test_no_clip_of_a_runtime_hides_what_is_not_a_number(exported):
    graph = onnx.load(plan_files.onnx_file(exported)).graph
    [last] = [node.op_type for node in graph.node if "wave" in node.output]
    assert last == "Where"


def test_a_file_of_other_weights_is_seen(exported):
    decoder = plans.load_decoder(exported)
    with torch.inference_mode():
        decoder.leave.bias += 0.01
    with pytest.raises(
        ConfigError, match=r"differs from torch by 1\.0e-02, more than 1e-04; nothing was written"
    ):
        plans.check(decoder, plan_files.onnx_file(exported))


def test_what_fails_the_check_is_not_written(checkpoint, tmp_path, monkeypatch, capsys):
    folder = without_plans(checkpoint, tmp_path)
    monkeypatch.setattr(plans, "export", lambda decoder, file: file.write_bytes(b"new"))
    monkeypatch.setattr(plans, "differences", lambda *_: [0.1])
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: None)
    target = plan_files.onnx_file(folder)
    target.parent.mkdir()
    target.write_bytes(b"old")
    assert plans.main(["--checkpoint", str(folder)]) == 1
    assert "differs from torch by 1.0e-01" in capsys.readouterr().err
    assert target.read_bytes() == b"old"
    assert {file.name for file in target.parent.iterdir()} == {target.name, ".lock"}
    for bad in (float("nan"), float("inf")):
        monkeypatch.setattr(plans, "differences", lambda *_, bad=bad: [bad])
        assert plans.main(["--checkpoint", str(folder)]) == 1


# -- engine onnx ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1] * 59, [4, 25, 25], [3, 1, 40, 2], []], ids=["1", "4", "ragged", "all"])
def test_chunks_of_any_size_give_the_same_samples(engine, whole, sizes):
    frames = random_frames(60, 1)
    pcm = sound(engine, chunks_of("a", frames, sizes))
    assert pcm.shape == (60 * RATE - MISSING,) and pcm.dtype == np.float32
    np.testing.assert_allclose(pcm, whole(frames), atol=1e-5)
    assert engine.stats() == {"active": 0, "codec_frames": engine.stats()["codec_frames"], "state_bytes": 0}


def test_streams_of_any_phase_share_a_batch(engine, whole):
    rng = random.Random(8)
    frames = {f"s{n}": random_frames(rng.randint(1, 60), n) for n in range(9)}
    waiting = {name: chunks_of(name, mine, [rng.randint(1, 30)] * 90) for name, mine in frames.items()}
    together = {name: [] for name in frames}
    while any(waiting.values()):
        names = [name for name, chunks in waiting.items() if chunks][:8]
        for name, answer in zip(names, engine.run([waiting[name].pop(0) for name in names]), strict=True):
            together[name].append(answer["pcm"])
    for name, mine in frames.items():
        np.testing.assert_allclose(np.concatenate(together[name]), whole(mine), atol=1e-5)
    assert engine.stats()["active"] == 0


def test_a_state_that_is_not_a_number_ends_its_stream_and_no_other(engine, whole):
    frames = random_frames(30, 2)
    parts = np.split(frames, [5])
    heard = engine.run([Chunk(name, {"frames": parts[0]}, start=True, end=False) for name in "ab"])[1]["pcm"]
    engine._waves._memory[engine._slots["a"]] = np.nan
    later = [Chunk(name, {"frames": parts[1]}, start=False, end=False) for name in "ab"]
    assert_only_the_first_ended(engine, later, whole(frames)[len(heard) :])


def test_the_plan_of_memory_has_the_states_to_the_byte(engine, exported):
    terms = {term.name: term for term in OnnxCode2Wav.memory(Ground("code2wav", exported), OPTIONS)}
    assert terms["stream states"].num_bytes == engine._waves._memory.nbytes


def test_a_missing_file_is_one_sentence_with_the_command(checkpoint, tmp_path):
    folder = without_plans(checkpoint, tmp_path)
    with pytest.raises(ConfigError) as refusal:
        OnnxCode2Wav(Placement(folder), ExportedOptions())
    assert str(refusal.value) == (
        f"code2wav has no '{folder}/plans/code2wav.onnx'; run `python build/plans.py --checkpoint {folder}`"
    )


def test_a_file_that_is_none_is_refused(checkpoint, tmp_path):
    folder = without_plans(checkpoint, tmp_path)
    plan_files.onnx_file(folder).parent.mkdir()
    plan_files.onnx_file(folder).write_bytes(b"something else")
    with pytest.raises(ConfigError, match="onnxruntime cannot load") as refusal:
        OnnxCode2Wav(Placement(folder), ExportedOptions())
    assert "\n" not in str(refusal.value)


def test_a_file_of_another_codec_or_version_is_refused(engine, exported):
    session, file = engine._waves._session, plan_files.onnx_file(exported)
    check_step(session, SimpleNamespace(num_quantizers=BOOKS), file, exported)
    with pytest.raises(ConfigError, match="is not the step of this codec and this version"):
        check_step(session, SimpleNamespace(num_quantizers=BOOKS + 1), file, exported)
    older = SimpleNamespace(
        get_inputs=session.get_inputs,
        get_outputs=session.get_outputs,
        get_modelmeta=lambda: SimpleNamespace(custom_metadata_map={}),
    )
    with pytest.raises(ConfigError, match="is not the step"):
        check_step(older, SimpleNamespace(num_quantizers=BOOKS), file, exported)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="onnxruntime can use a GPU here"
)
def test_a_device_that_onnxruntime_cannot_use_is_refused(exported):
    with pytest.raises(ConfigError, match=r"cannot run on cuda:0; install onnxruntime-gpu .* `device: cpu`"):
        OnnxCode2Wav(Placement(exported, "cuda:0"), ExportedOptions())


# -- TensorRT ------------------------------------------------------------------------------------------------


def test_a_plan_is_named_by_stage_architecture_and_library(tmp_path):
    library = SimpleNamespace(__name__="tensorrt", __version__="10.13.0.35")
    name = plan_files.library_name(library)
    file = plan_files.plan_file(tmp_path, plan_files.architecture_of((9, 0)), name)
    assert file == tmp_path / "plans" / "code2wav.sm90.tensorrt-10.13.0.35.plan"


def test_a_plan_of_another_gpu_or_version_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no plan of sm90 and tensorrt-10\.13 .*, no plan at all; run `python"
    ):
        plan_files.require_plan(tmp_path, "sm90", "tensorrt-10.13")
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "code2wav.sm80.tensorrt-10.13.plan").touch()
    with pytest.raises(
        ConfigError, match=r"only code2wav\.sm80\.tensorrt-10\.13\.plan; run .* --tensorrt` on this"
    ):
        plan_files.require_plan(tmp_path, "sm90", "tensorrt-10.13")
    assert plan_files.require_plan(tmp_path, "sm80", "tensorrt-10.13").is_file()


def test_a_plan_may_be_read_by_whoever_serves(checkpoint, tmp_path, monkeypatch):
    folder = without_plans(checkpoint, tmp_path)
    plan_files.onnx_file(folder).parent.mkdir()
    plan_files.onnx_file(folder).touch()
    monkeypatch.setattr(plans, "find_library", lambda: SimpleNamespace(__name__="trt", __version__="1"))
    monkeypatch.setattr(plans, "build_plan", lambda *_: b"a plan")
    plan = plans.write_plan(folder, "sm89", 1, 1)
    assert plan.read_bytes() == b"a plan" and plan.stat().st_mode & 0o777 == 0o666 & ~umask()
    assert set(plan.parent.iterdir()) == {plan, plan_files.onnx_file(folder)}


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_engine_without_what_it_needs_is_refused(checkpoint, monkeypatch):
    def refused(device="cuda:0"):
        with pytest.raises(ConfigError) as refusal:
            TensorrtCode2Wav(Placement(checkpoint, device), ExportedOptions())
        return str(refusal.value)

    assert "engine tensorrt on device cpu, where no plan runs; give it `device: gpu`" in refused("cpu")
    for name in plan_files.LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    assert "neither tensorrt nor tensorrt_rtx is installed" in refused()
    given = SimpleNamespace(__name__="tensorrt", __version__="10.13.0.35")
    monkeypatch.setitem(sys.modules, "tensorrt", given)
    assert code2wav_tensorrt.find_library() is given
    if not torch.cuda.is_available():
        assert "needs an NVIDIA GPU, and torch finds none here" in refused()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert "no plan of sm90 and tensorrt-10.13.0.35" in refused()


class StandIn:
    """An ICudaEngine and its context on the CPU: works on the addresses it is told, by onnxruntime."""

    def __init__(self, session, rows, frames):
        self._session, self._most = session, (rows, frames)
        self._shapes, self._addresses = {}, {}
        self.passes = []

    def create_execution_context(self):
        return self

    def get_tensor_shape(self, name):
        (shape,) = (tensor.shape for tensor in self._session.get_inputs() if tensor.name == name)
        return [size if isinstance(size, int) else -1 for size in shape]

    def set_input_shape(self, name, shape):
        expected = self.get_tensor_shape(name)
        assert len(shape) == len(expected) and shape[0] <= self._most[0]
        assert all(size in (-1, given) for size, given in zip(expected, shape, strict=True))
        self._shapes[name] = shape

    def set_tensor_address(self, name, address):
        self._addresses[name] = address

    def execute_async_v3(self, stream):
        rows, frames, _ = self._shapes["codes"]
        assert frames <= self._most[1]
        self.passes.append((rows, frames))
        given = {name: self._at(name, self._shapes[name]).copy() for name in plan_files.INPUTS}
        for name, made in zip(plan_files.OUTPUTS, self._session.run(plan_files.OUTPUTS, given), strict=True):
            self._at(name, made.shape)[:] = made
        return True

    def _at(self, name, shape):
        kind = ctypes.c_float if name.startswith(("memory", "wave")) else ctypes.c_int32
        pointer = ctypes.cast(self._addresses[name], ctypes.POINTER(kind))
        return np.ctypeslib.as_array(pointer, (int(np.prod(shape)),)).reshape(shape)


def test_passes_of_a_plan_keep_the_pool(engine, exported, whole, monkeypatch):
    """All of the engine but the plan itself: buckets, spare rows, slots, addresses, types."""
    for stream in ("current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, stream, lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    stand_in = StandIn(engine._waves._session, 4, 16)
    buckets = Buckets.of(8, (4, 8, 16)).up_to(4)
    waves = TensorrtWaves(stand_in, plans.codec_config(exported), buckets, 7, "cpu")
    planned = {
        term.name: term.num_bytes
        for term in TensorrtCode2Wav.memory(
            Ground("code2wav", exported, on_gpu=True), ExportedOptions(max_streams=7)
        )
    }
    assert planned["stream states"] == waves._pool["memory"].nbytes
    assert planned["static buffers"] >= sum(tensor.nbytes for tensor in waves._flat.values())
    frames = [random_frames(length, seed) for seed, length in enumerate((30, 9, 41, 3, 22, 17, 26, 12))]
    heard = {number: [] for number in range(len(frames))}
    for numbers in ((0, 1, 2, 3, 4, 5, 6), (7,)):  # the last one in a slot that another had
        for slot, _ in enumerate(numbers):
            waves.begin(slot)
        cuts = {number: list(np.array_split(frames[number], 3)) for number in numbers}
        for _ in range(3):
            shares = [Share(slot, cuts[number].pop(0)) for slot, number in enumerate(numbers)]
            for number, samples in zip(numbers, waves.decode(shares), strict=True):
                heard[number].append(samples)
    for number, mine in heard.items():
        np.testing.assert_allclose(np.concatenate(mine), whole(frames[number]), atol=1e-5)
    assert set(stand_in.passes) <= set(buckets.shapes())
    assert (4, 16) in stand_in.passes  # three streams and a spare row


def test_a_model_of_tritons_own_backend(checkpoint):
    codec = plans.codec_config(checkpoint)
    text = text_format.MessageToString(plan_model("c2w", codec, 4711, 16, (4, 25)))
    config = text_format.Parse(text, pb.ModelConfig())  # as the server reads it
    assert (config.name, config.platform, config.backend) == ("c2w", "tensorrt_plan", "tensorrt")
    assert config.max_batch_size == 16 and config.default_model_filename == "model.plan"
    batching = config.sequence_batching
    assert batching.WhichOneof("strategy_choice") == "oldest"
    (start,) = batching.control_input
    (control,) = start.control
    assert control.kind == pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_START
    assert (start.name, list(control.int32_false_true)) == ("start", [0, 1])
    inputs = {one.name: (one.data_type, list(one.dims)) for one in config.input}
    states = {one.input_name: (one.data_type, list(one.dims)) for one in batching.state}
    outputs = [one.name for one in config.output] + [one.output_name for one in batching.state]
    assert inputs == {"codes": (pb.TYPE_INT32, [-1, BOOKS]), "valid": (pb.TYPE_INT32, [1])}
    assert states == {"memory": (pb.TYPE_FP32, [4711]), "frames": (pb.TYPE_INT32, [1])}
    assert {*inputs, *states, start.name} == set(plan_files.INPUTS) and tuple(outputs) == plan_files.OUTPUTS
    for state in batching.state:
        (initial,) = state.initial_state
        assert initial.zero_data and list(initial.dims) == list(state.dims)
    assert config.instance_group[0].kind == pb.ModelInstanceGroup.KIND_GPU
    published = {key: value.string_value for key, value in config.parameters.items()}
    assert published == {
        "samples_per_frame": str(RATE),
        "missing_samples": str(MISSING),
        "codebook_size": "64",
        "chunk_frames": "4,25",
    }


def test_callers_of_that_model_pad_to_the_sizes_that_a_deploy_file_cuts(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "deploy").mkdir()
    text = "pipeline: qwen3_omni\nchunks: {initial_codec_chunk_frames: 2, codec_chunk_frames: 12}\n"
    (tmp_path / "deploy" / "deploy.yaml").write_text(text)
    (tmp_path / "growing.yaml").write_text("chunks: {codec_chunk_growth: 3}\n")
    made = tmp_path / "model.plan"
    made.write_bytes(b"a plan")
    monkeypatch.setattr(plans, "write_onnx", lambda *_: None)
    monkeypatch.setattr(plans, "write_plan", lambda *_: made)

    def published(*words):
        assert plans.main(["--checkpoint", str(checkpoint), "--model", str(tmp_path / "c2w"), *words]) == 0
        config = text_format.Parse((tmp_path / "c2w" / "config.pbtxt").read_text(), pb.ModelConfig())
        return config.parameters["chunk_frames"].string_value

    own = ["--deploy", str(tmp_path / "deploy")]
    assert published() == "4,8,16,25", "what the deploy.yaml in the box says"
    assert published(*own) == "2,12"
    assert published(*own, "--profile", str(tmp_path / "growing.yaml")) == "2,6,12"
    assert published(*own, "--max-frames", "8") == "2,8"


@pytest.mark.server
def test_a_real_server_lacks_nothing_but_the_backend_for_that_model(checkpoint, tmp_path):
    try:
        server, python = servers.find(), servers.Interpreter.current()
    except ConfigError as error:
        pytest.skip(str(error))
    if (server.backends / "tensorrt").exists():
        pytest.skip("this server has the backend, and would want a plan")
    model = tmp_path / "models" / "c2w"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.plan").touch()
    config = plan_model("c2w", plans.codec_config(checkpoint), 4711, 16, (4, 25))
    (model / "config.pbtxt").write_text(text_format.MessageToString(config))
    backends = servers.compose(server, tmp_path / "backends")
    words = [server.binary, f"--model-repository={model.parent}", f"--backend-directory={backends}"]
    words += [f"--allow-{kind}=false" for kind in ("http", "grpc", "metrics")]
    done = subprocess.run(
        list(map(str, words)),
        env=servers.environment(server, python),
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = (done.stdout + done.stderr).splitlines()
    faults = [line for line in lines if line.startswith("E") and "c2w" in line]
    assert done.returncode != 0 and len(faults) == 1, lines
    assert "unable to find backend library for backend 'tensorrt'" in faults[0]


def test_tensorrt_for_rtx_builds_plans_without_a_gpu(exported, tmp_path, capsys):
    folder = without_plans(exported, tmp_path)
    (folder / "plans").mkdir()
    plan_files.onnx_file(folder).symlink_to(plan_files.onnx_file(exported))
    library = code2wav_tensorrt.find_library()
    plan = plans.write_plan(folder, "sm89", max_rows=4, max_frames=25)
    assert plan.name == f"code2wav.sm89.{library.__name__}-{library.__version__}.plan"
    assert plan.stat().st_size > 10_000
    plans.write_model(folder, plan, tmp_path / "c2w_native", 4, 25, Chunks())
    config = text_format.Parse((tmp_path / "c2w_native" / "config.pbtxt").read_text(), pb.ModelConfig())
    memory = next(state for state in config.sequence_batching.state if state.input_name == "memory")
    session = onnxruntime.InferenceSession(plan_files.onnx_file(exported))
    assert list(memory.dims) == session.get_inputs()[0].shape[1:]
    assert config.parameters["chunk_frames"].string_value == "4,25"
    assert (tmp_path / "c2w_native" / "1" / "model.plan").read_bytes() == plan.read_bytes()
    with pytest.raises(ConfigError, match=r"builds no plans for sm90; it knows sm75, .*sm89"):
        plans.build_plan(library, plan_files.onnx_file(exported), "sm90", 4, 25)


def test_the_default_checkpoint_is_the_tiny_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITONE_CACHE", str(tmp_path))
    monkeypatch.setattr(plans, "checkpoint_dir", lambda name: tmp_path / name)
    assert plans.main([]) == 1
    assert "qwen3_omni_tiny.py" in capsys.readouterr().err
