"""A product with a weight, in the layout that the device multiplies fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FOR_ROWS = 8  # batch size that the packed layout is chosen for; others work as well
_PACKED_FROM = 1 << 18  # elements; the call on a packed weight costs more than it saves on a smaller one


class Linear:
    """`y = x Wᵀ + b`, with the weight in the layout that the device multiplies fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in]; bias: [out]."""
        self._weight, self._bias = weight, bias
        self._packed = _can_pack(weight)
        if self._packed:
            # Small batches run about a third faster: a plain weight is packed anew in every call.
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    @property
    def weight(self) -> Tensor:
        """[out, in]; it was not packed, and there is no bias."""
        assert not self._packed and self._bias is None
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.numel() >= _PACKED_FROM
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
