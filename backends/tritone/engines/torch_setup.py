"""torch as the engines of a stage use it."""

from __future__ import annotations

from typing import Any

from tritone.engines.base import Placement


def prepared_torch(placement: Placement) -> Any:
    """The module torch, with the threads and the stream that the placement gives.

    On a GPU float32 is in earnest, and this thread launches into the stream from now on.
    """
    import torch

    if placement.device == "cpu":
        torch.set_num_threads(placement.threads)
    else:
        # TF32 keeps 10 bits of a float32's 23; convolutions use it unless told otherwise.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        placement.stream.open(torch, placement.device)
    return torch
