"""The tapped worker on a GPU."""

from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from tritone.engines.vllm.worker import tapped

Worker = tapped(GpuWorker)
