"""Passes of Code2Wav as CUDA graphs: one launch a pass, one graph for each bucket of rows and frames.

    host ─► pinned ─► packed int32 [rows, columns] ─► graph of the bucket ─► wave float32 ─► pinned ─► host
                                                       └─ pool[slots] ─► WaveformDecoder.step ─► pool[slots]

A captured pass is a program: a function of its bucket, over buffers at fixed addresses. On a CPU, which has
no graphs, it is called.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tritone.engines.cuda_graphs import CudaGraphs
from tritone.networks.waveform_decoder import WaveformDecoder
from tritone.pipelines.qwen3_omni.wave_steps import Buckets, StepWaves
from tritone.ports import Array

SLOT, VALID, START, CODES = 0, 1, 2, 3  # columns of a packed row; its codes fill the rest


@dataclass(frozen=True)
class WaveBuffers:
    """On the device; passes of every bucket use the beginning of `packed` and `wave`."""

    packed: Tensor  # int32 [elements of the largest bucket]
    wave: Tensor  # float32 [samples of the largest bucket]
    memory: Tensor  # [slots + 1, memory_size]: states of all streams
    frames: Tensor  # int32 [slots + 1]: frames of each, up to age_limit

    @classmethod
    def of(cls, decoder: WaveformDecoder, buckets: Buckets, slots: int) -> WaveBuffers:
        shapes, config, device = list(buckets.shapes()), decoder.config, decoder.device
        columns = max(rows * row_columns(frames, config.num_quantizers) for rows, frames in shapes)
        samples = max(rows * frames for rows, frames in shapes) * config.samples_per_frame
        return cls(
            packed=torch.zeros(columns, dtype=torch.int32, device=device),
            wave=torch.zeros(samples, device=device),
            memory=torch.zeros((slots + 1, decoder.memory_size), dtype=decoder.dtype, device=device),
            frames=torch.zeros(slots + 1, dtype=torch.int32, device=device),
        )


def row_columns(frames: int, codebooks: int) -> int:
    """int32 elements of a packed row."""
    return CODES + frames * codebooks


class StepProgram:
    """One pass over the pool; waits for nothing, and allocates nothing that outlives it."""

    def __init__(self, buffers: WaveBuffers, decoder: WaveformDecoder) -> None:
        self._buffers, self._decoder = buffers, decoder

    @torch.inference_mode()
    def __call__(self, rows: int, frames: int) -> None:
        buffers, config = self._buffers, self._decoder.config
        columns = row_columns(frames, config.num_quantizers)
        packed = buffers.packed[: rows * columns].view(rows, columns)
        slots = packed[:, SLOT].long()
        codes = packed[:, CODES:].reshape(rows, frames, config.num_quantizers)
        wave, memory, ages = self._decoder.step(
            buffers.memory[slots], buffers.frames[slots], codes, packed[:, VALID], packed[:, START].bool()
        )
        buffers.memory[slots] = memory  # rows that only fill a bucket write what was there
        buffers.frames[slots] = ages
        buffers.wave[: wave.numel()].view_as(wave).copy_(wave)


class KernelProgram:
    """As StepProgram, with convolutions in kernels: the tails of streams stay in the pool."""

    def __init__(self, buffers: WaveBuffers, decoder: WaveformDecoder, buckets: Buckets) -> None:
        from tritone.kernels.waveform import WaveformKernels

        self._buffers, self._config = buffers, decoder.config
        self._kernels = WaveformKernels(decoder, buckets.shapes())

    @torch.inference_mode()
    def __call__(self, rows: int, frames: int) -> None:
        from tritone.kernels.convolution import Streams

        buffers, config = self._buffers, self._config
        columns = row_columns(frames, config.num_quantizers)
        packed = buffers.packed[: rows * columns].view(rows, columns)
        head = packed[:, :CODES].T.contiguous()
        slots, valid, starts = head[SLOT], head[VALID], head[START]
        codes = packed[:, CODES:].reshape(rows, frames, config.num_quantizers)
        ages = buffers.frames[slots.long()].masked_fill_(starts.bool(), 0)
        wave = buffers.wave[: rows * frames * config.samples_per_frame].view(rows, -1)
        self._kernels(codes, buffers.memory, Streams(slots, valid, ages, starts), wave)
        buffers.frames[slots.long()] = (ages + valid).clamp_(max=config.age_limit)


class GraphWaves(StepWaves):
    """Launches a captured program."""

    def __init__(self, decoder: WaveformDecoder, buckets: Buckets, slots: int, kernels: bool = False) -> None:
        """Capture the program for every bucket. kernels: with our own convolutions, where triton is."""
        super().__init__(decoder.config, buckets, slots)
        self.state_bytes = decoder.state_bytes
        self._buffers = buffers = WaveBuffers.of(decoder, buckets, slots)
        # A program holds the weights, of which a graph knows no more than the addresses.
        has_kernels = kernels and importlib.util.find_spec("triton")
        program = KernelProgram(buffers, decoder, buckets) if has_kernels else StepProgram(buffers, decoder)
        self._program: KernelProgram | StepProgram = program
        is_cuda = decoder.device.type == "cuda"
        self._packed = torch.zeros(buffers.packed.shape, dtype=torch.int32, pin_memory=is_cuda)
        self._wave = torch.zeros(buffers.wave.shape, pin_memory=is_cuda)
        captured = CudaGraphs(decoder.device)
        # The largest first: the others then live in the memory that it has taken.
        self._replays = {shape: captured(partial(self._program, *shape)) for shape in buckets.shapes()}

    @torch.inference_mode()
    def _step(self, slots: Array, starts: Array, codes: Array, valid: Array) -> Array:
        rows, frames, _ = codes.shape
        size = rows * row_columns(frames, codes.shape[2])
        packed = self._packed[:size].numpy().reshape(rows, -1)
        packed[:, SLOT], packed[:, VALID], packed[:, START] = slots, valid, starts
        packed[:, CODES:] = codes.reshape(rows, -1)
        self._buffers.packed[:size].copy_(self._packed[:size], non_blocking=True)
        self._replays[rows, frames]()
        used = int(np.count_nonzero(valid)) * frames * self.config.samples_per_frame
        wave = self._wave[:used]
        wave.copy_(self._buffers.wave[:used], non_blocking=True)
        if wave.is_pinned():
            torch.cuda.current_stream(self._buffers.wave.device).synchronize()
        return wave.numpy().reshape(-1, frames * self.config.samples_per_frame).copy()
