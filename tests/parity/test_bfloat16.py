"""How far bfloat16 is from float32 on a GPU where both take the same codes and tokens, in kernels and not.

Weights are random, in the shapes of the tiny checkpoint. Of every frame and step the scores are compared: how
far they are from the right ones, and how often the likeliest code or token is the same.
"""

from __future__ import annotations

import pytest

for package in ("torch", "transformers", "triton"):
    pytest.importorskip(package)

import numpy as np  # noqa: E402
import qwen3_omni_oracle as oracle  # noqa: E402
import torch  # noqa: E402

import talker_frame  # noqa: E402
import thinker_step  # noqa: E402
from tritone.checkpoint import read_config  # noqa: E402
from tritone.engines.token_buffers import TokenRow  # noqa: E402
from tritone.engines.token_graph import PlainTokens  # noqa: E402
from tritone.engines.token_kernels import KernelTokens  # noqa: E402
from tritone.networks.decoder_config import DecoderConfig  # noqa: E402
from tritone.pipelines.qwen3_omni.frame_buffers import pack  # noqa: E402
from tritone.pipelines.qwen3_omni.frame_kernels import KernelProgram  # noqa: E402
from tritone.pipelines.qwen3_omni.frame_row import FrameRow  # noqa: E402
from tritone.sampling import Sampling  # noqa: E402

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU")
GREEDY = Sampling(temperature=0.0)
RIGHT, PLAIN, KERNELS = (torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)  # in kernels?
FURTHEST = 0.03  # of a row; plain torch on a CPU is 0.010 off in the talker, and 0.018 in the thinker
FURTHER = 1.5  # times as far as plain torch


def distance(some, right):
    """Of rows of scores [R, V] from the right ones, by their size: the median, since a rounding may send one
    to other experts. And the share of rows whose likeliest code or token is the same."""
    pairs = [(one.double(), other.double()) for one, other in zip(some, right, strict=True)]
    off = torch.cat([(one - other).norm(dim=1) / other.norm(dim=1) for one, other in pairs])
    same = torch.cat([one.argmax(1) == other.argmax(1) for one, other in pairs])
    return float(off.median()), float(same.double().mean())


def assert_near(right, plain, kernels, least_same):
    (plain_off, plain_same), (off, same) = distance(plain, right), distance(kernels, right)
    assert 0 < plain_off <= FURTHEST and 0 < off <= FURTHER * plain_off, (off, plain_off)
    assert min(plain_same, same) >= least_same, (same, plain_same)


# -- talker ------------------------------------------------------------------------------------------------


def talker_scores(device, dtype, kernels, rows, frames):
    """Scores [R, V] of every codebook of every frame, of which each takes codes that chance chose."""
    model = talker_frame.Model(oracle.checkpoint(), dtype, rows, frames + 1, device)
    chance = torch.Generator().manual_seed(3)
    programs = {True: KernelProgram, False: talker_frame.ForcedProgram}
    program = programs[kernels](model.buffers, model.decoder, model.predictor, model.codec)
    books, found = model.buffers.frames.shape[1], []
    for number in range(frames):
        texts = torch.randn((rows, model.hidden_size), generator=chance)
        codes = torch.randint(0, model.predictor.vocab_size, (rows, books), generator=chance).to(device)
        asked = [
            FrameRow(slot, number, None, texts[slot], not number, GREEDY, number, (), True, False)
            for slot in range(rows)
        ]
        packed = np.zeros(tuple(model.buffers.packed.shape), np.int32)
        pack(asked, model.codec, model.buffers.seen.shape[1], packed)
        with torch.inference_mode():
            model.buffers.packed.copy_(torch.from_numpy(packed))
            model.buffers.text.copy_(texts)
            if kernels:
                found += talker_frame.scored_kernels(program, rows, codes)
            else:
                program.codes = codes
                program(rows)
                found += program.scores
        assert model.buffers.frames.tolist() == codes.tolist()
    return found


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [1, 8])
def test_a_talker_in_bfloat16_is_near_the_one_in_float32(rows):
    ways = (RIGHT, PLAIN, KERNELS)
    assert_near(*(talker_scores("cuda:0", *way, rows, frames=6) for way in ways), least_same=0.92)


# -- thinker -----------------------------------------------------------------------------------------------


@torch.inference_mode()
def thinker_scores(dtype, kernels, rows, steps):
    """Logits [R, V] of every step, which takes tokens that chance chose; where thinker_step.py runs."""
    text = read_config(oracle.checkpoint())["thinker_config"]["text_config"]
    config = DecoderConfig.from_hf(text, family="qwen3_moe")
    model = thinker_step.Model(config, dtype, torch.bfloat16, rows, context=64)
    graphs = model.steps(KernelTokens if kernels else PlainTokens, rows)
    chance, found = torch.Generator().manual_seed(3), []
    for place in range(model.filled, model.filled + steps):
        tokens = torch.randint(0, config.vocab_size, (rows,), generator=chance).tolist()
        asked = [
            TokenRow(slot, place, None, token, GREEDY, place + 1, False) for slot, token in enumerate(tokens)
        ]
        graphs.launch(asked).tokens()
        found.append(model.buffers.logits[:rows].clone())
    return found


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [1, 8])
def test_a_thinker_in_bfloat16_is_near_the_one_in_float32(rows):
    ways = (RIGHT, PLAIN, KERNELS)
    assert_near(*(thinker_scores(*way, rows, steps=24) for way in ways), least_same=0.8)
