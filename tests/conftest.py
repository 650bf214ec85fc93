"""What every test may rely on."""

import importlib.util
import signal
import sys

# A job in the background of a shell starts with SIGINT ignored, one that outlives it with SIGHUP, and
# children inherit that: tests that interrupt a program would then wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
