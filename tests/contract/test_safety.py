"""Promises about what the shipped code never does, held by reading the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "backends").rglob("*.py") if "__pycache__" not in path.parts)
# Formats that run code when they are read.
CODE_RUNNING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
LOG_METHODS = {"info", "warning", "error", "exception", "critical", "log_info", "log_warn", "log_error"}


def nodes(path, kind):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind)]


def called(node):
    """ "torch.load" of the call torch.load(...); "eval" of eval(...)."""
    return ast.unparse(node.func)


def keyword(node, name):
    return next((ast.unparse(word.value) for word in node.keywords if word.arg == name), None)


def faults(path):
    found = []
    for node in nodes(path, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        found += [name for name in names if name.split(".")[0] in CODE_RUNNING_MODULES]
    for node in nodes(path, ast.Call):
        name = called(node)
        bad = (
            name in {"eval", "exec", "__import__", "compile", "os.system", "os.popen", "tempfile.mktemp"}
            or (name == "torch.load" and keyword(node, "weights_only") != "True")
            or name in {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}
            or (name in {"np.load", "numpy.load"} and keyword(node, "allow_pickle") not in (None, "False"))
            or keyword(node, "shell") == "True"
            or keyword(node, "trust_remote_code") == "True"
        )
        found += [name] if bad else []
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_that_is_read_can_run_code(path):
    assert faults(path) == []


def test_the_reader_of_sources_sees_what_it_looks_for(tmp_path):
    source = tmp_path / "bad.py"
    source.write_text(
        "import pickle\nfrom dill import loads\ntorch.load(f)\ntorch.load(f, weights_only=False)\n"
        "yaml.load(f)\neval('1')\nnp.load(f, allow_pickle=True)\nrun(x, shell=True)\nmodel.eval()\n"
        "torch.load(f, weights_only=True)\nyaml.safe_load(f)\nrequest.exec()\nre.compile('x')\n"
    )
    assert len(faults(source)) == 8


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_line_of_the_log_repeats_a_value_as_it_is(path):
    """`repr` of an exception holds what it is about, and of a message what a client sent."""
    lines = [
        node.lineno
        for node in nodes(path, ast.Call)
        if called(node).rpartition(".")[2] in LOG_METHODS
        and ("!r" in ast.unparse(node) or "%r" in ast.unparse(node) or "repr(" in ast.unparse(node))
    ]
    assert lines == []
