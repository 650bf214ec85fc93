"""The tapped worker on a CPU."""

from vllm.v1.worker.cpu_worker import CPUWorker

from tritone.engines.vllm.worker import tapped

Worker = tapped(CPUWorker)
