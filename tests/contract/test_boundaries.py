"""Promises about where things live, held by reading the source."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "backends" / "tritone"
SPEAKS_TO_TRITON = {"triton.py", "bls.py"}
HEAVY = {
    "torch",
    "vllm",
    "diffusers",
    "onnxruntime",
    "transformers",
    "faster_whisper",
    "ctranslate2",
    "google",
}
TUNES = re.compile(r"autotun|max-autotune|cudnn\.(benchmark|flags)|cudnn import|import cudnn", re.IGNORECASE)


def imported_modules(path):
    """Top-level names of everything a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def python_files(folder):
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def test_only_two_modules_and_the_doors_speak_to_triton():
    speakers = {
        path.relative_to(LIBRARY).as_posix()
        for path in python_files(LIBRARY)
        if "triton_python_backend_utils" in imported_modules(path)
    }
    assert speakers == SPEAKS_TO_TRITON


def test_only_two_modules_import_opentelemetry():
    importers = {
        path.relative_to(ROOT).as_posix()
        for folder in ("backends", "client")
        for path in python_files(ROOT / folder)
        if "opentelemetry" in imported_modules(path)
    }
    assert importers == {"backends/tritone/otlp.py", "backends/tritone/otlp_message.py"}


def test_doors_import_nothing_but_the_library():
    doors = sorted((ROOT / "backends").glob("tritone_*/model.py"))
    assert [door.parent.name for door in doors] == ["tritone_batch", "tritone_engine", "tritone_pipeline"]
    for door in doors:
        assert imported_modules(door) <= {"tritone", "json", "os"}, door


@pytest.mark.parametrize("module", ["stage_door", "orchestrator"])
def test_what_a_stub_imports_is_light(module):
    """The stub's pb_utils exists only in a server, so a stand-in takes its place."""
    code = (
        "import sys, types; sys.modules['triton_python_backend_utils'] = types.ModuleType('pb');"
        f"import tritone.{module}; from tritone import pipelines, deploy_reader;"
        f"deploy_reader.load(__import__('pathlib').Path('{ROOT}/model_repository/smoltalk/deploy.yaml'));"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=LIBRARY.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_models_name_appears_in_one_path_of_the_library():
    words = ("smoltalk", "smollm", "hibari")
    elsewhere = [
        f"{path.relative_to(LIBRARY)}:{number}"
        for path in python_files(LIBRARY)
        if "smoltalk" not in path.relative_to(LIBRARY).parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(word in line.lower() for word in words)
        and '"smoltalk": "tritone.pipelines.smoltalk"' not in line
    ]
    # An example in a help text or an error may name the default pipeline; code may not.
    assert [place for place in elsewhere if not _is_text(place)] == []


def _is_text(place):
    name, _, number = place.partition(":")
    path = LIBRARY / name
    spans = [
        (node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    line = path.read_text().splitlines()[int(number) - 1]
    return line.lstrip().startswith("#") or any(low <= int(number) <= high for low, high in spans)


def tuning(source):
    """Code, without its comments, that chooses among programs by their time."""
    return [line.strip() for line in ast.unparse(ast.parse(source)).splitlines() if TUNES.search(line)]


def test_nothing_is_tuned_at_start():
    """Tiles are chosen by shape, in kernels/tiles.py. What times programs takes the quickest of this start,
    which may add up in another order than that of the last one: a seed would not give the same answer twice,
    and a start would take minutes on a GPU that others use.
    """
    chosen = {
        path.name: found for path in python_files(LIBRARY.parent) if (found := tuning(path.read_text()))
    }
    assert chosen == {}


@pytest.mark.parametrize(
    "source",
    [
        "@triton.autotune(configs, key)\ndef kernel(): pass",
        "torch.backends.cudnn.benchmark = True",
        "torch.compile(step, mode='max-autotune')",
        "from torch.backends import cudnn",
    ],
)
def test_what_tunes_is_seen(source):
    assert len(tuning(source)) == 1 and tuning(f"pass  # {source.splitlines()[0]}") == []


def test_files_stay_readable():
    long = {
        path.relative_to(ROOT).as_posix(): count
        for folder in ("backends", "client", "build")
        for path in python_files(ROOT / folder)
        if (count := len(path.read_text().splitlines())) > 500
    }
    assert long == {}, "is there a second noun inside?"


def test_no_catch_all_modules():
    bad = {"utils", "helpers", "common", "misc", "lib"}
    found = [
        path
        for folder in ("backends", "client", "build")
        for path in python_files(ROOT / folder)
        if path.stem in bad
    ]
    assert found == [] and not (ROOT / "build" / "__init__.py").exists()
