import inspect
import subprocess
import sys

import tritone_client
from tritone_client.request import RequestOptions, build_request


def test_all_names_what_the_package_offers():
    public = {
        name
        for name, value in vars(tritone_client).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(tritone_client.__all__)
    assert sorted(tritone_client.__all__) == tritone_client.__all__


def test_every_public_class_and_function_says_what_it_is():
    undocumented = [
        name
        for name in tritone_client.__all__
        if inspect.isroutine(value := getattr(tritone_client, name)) or inspect.isclass(value)
        if not value.__doc__
    ]
    assert undocumented == []


def test_request_options_are_the_arguments_of_build_request():
    arguments = set(inspect.signature(build_request).parameters) - {"prompt"}
    assert set(RequestOptions.__annotations__) == arguments


def test_sync_face_has_every_call_of_the_async_client():
    def calls(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in methods if name[0] != "_"}

    assert calls(tritone_client.TritoneClient) == calls(tritone_client.AsyncTritoneClient)


def test_import_is_light():
    heavy = ("soundfile", "rich", "tritone")
    code = f"import sys, tritone_client.cli; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
