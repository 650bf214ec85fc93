"""What every test may rely on."""

import gc
import importlib.util
import os
import signal
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# Without a GPU kernels run in Triton's interpreter; a torch that is made for GPUs imports triton by itself.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

# A job in the background of a shell starts with SIGINT ignored, one that outlives it with SIGHUP, and
# children inherit that: tests that interrupt a program would then wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says nothing of what it shows.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# What the files import is there to the end. The collector need not look through it meanwhile, nor after it
# in every test that collects: a third of a second each time.
gc.disable()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Files that start servers come first: one of them at the end would keep a worker waiting."""
    items.sort(key=lambda item: item.get_closest_marker("server") is None)


# These run where vLLM is: `make test-vllm`.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm"]


class _TorchvisionFirst:
    """Imports torchvision before transformers does, the way that also works beside a CPU build of torch."""

    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            sys.meta_path.remove(self)
            if importlib.util.find_spec("torchvision"):
                from tritone.pipelines.qwen3_omni.processor import import_torchvision

                import_torchvision()
        return None


sys.meta_path.insert(0, _TorchvisionFirst())
