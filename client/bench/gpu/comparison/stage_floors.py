"""How long a step of each stage takes, against the least that the chip allows, and what the rest is.

    answers' timings ─► ms a step, batch ─┐
    config.json ─► bytes and operations ──┴─► floor: bytes / bandwidth or operations / rate, the larger
    torch trace of a stage, on a GPU ─► kernel time a step ─► rest = kernels above the floor + host and gaps

A mixture of experts reads the experts that its rows are sent to: E (1 - (1 - k / E)^B) of E for B rows that
choose k each, as if every expert were as likely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.tables import markdown
from comparison.workload import Workload
from tritone.networks.decoder_size import DecoderSize
from tritone.pipelines.qwen3_omni.sizes import OmniSizes
from tritone_bench.record import RequestRecord

STAGES = ("thinker", "talker", "code2wav")


@dataclass(frozen=True)
class Chip:
    """What it can do at best."""

    bytes_per_s: float = 4.8e12  # an H200's HBM3e
    operations_per_s: float = 989e12  # and its dense bfloat16 products


@dataclass(frozen=True)
class Floor:
    """What one step cannot do without."""

    bytes_read: float
    operations: float

    def seconds(self, chip: Chip) -> float:
        return max(self.bytes_read / chip.bytes_per_s, self.operations / chip.operations_per_s)

    def bound(self, chip: Chip) -> str:
        by_bytes = self.bytes_read / chip.bytes_per_s >= self.operations / chip.operations_per_s
        return "bytes" if by_bytes else "operations"


@dataclass(frozen=True)
class Step:
    """What was measured of a stage."""

    step_s: float
    batch: float  # sessions, or chunks, in a step
    frames: float = 1.0  # of a chunk
    kernel_s: float | None = None  # of a step, on the GPU; None: no trace was taken


def steps_of(records: Iterable[RequestRecord]) -> dict[str, Step]:
    """Of each stage that the answers tell of, the mean over all their steps or calls."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        for name, stage in record.timings.get("stages", {}).items():
            if "busy_s" in stage and (stage.get("steps") or stage.get("calls")):
                found.setdefault(name, []).append(stage)
    steps = {}
    for name, stages in found.items():
        counts = [stage.get("steps") or stage["calls"] for stage in stages]
        batched = sum(stage.get("batch", 1.0) * count for stage, count in zip(stages, counts, strict=True))
        calls = sum(stage.get("calls", 0) for stage in stages)
        frames = sum(stage.get("frames", 0) for stage in stages if "calls" in stage)
        steps[name] = Step(
            step_s=sum(stage["busy_s"] for stage in stages) / sum(counts),
            batch=batched / sum(counts),
            frames=frames / calls if calls else 1.0,
        )
    return steps


def floor_of(stage: str, sizes: OmniSizes, step: Step, workload: Workload, item_bytes: int) -> Floor:
    """Of a step of so many rows, halfway through an answer."""
    if stage == "code2wav":
        size = sizes.code2wav
        moved = size.held + 2 * step.batch * size.state
        return Floor(moved * item_bytes, size.flops * step.batch * step.frames)
    if stage == "thinker":
        keys = workload.prompt_tokens + workload.text_tokens / 2
        return _pass(sizes.thinker, step.batch, keys, item_bytes)
    keys = workload.prompt_tokens + workload.frames / 2
    frame = _pass(sizes.talker, step.batch, keys, item_bytes)
    residual = _pass(sizes.predictor, step.batch, sizes.residuals / 2, item_bytes)
    return Floor(
        frame.bytes_read + sizes.residuals * residual.bytes_read,
        frame.operations + sizes.residuals * residual.operations,
    )


def kernel_share(trace: Mapping[str, Any]) -> float | None:
    """Part of the time of a Chrome trace in which a kernel ran; None of a trace without kernels."""
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    if not spans:
        return None
    begin = min(float(event["ts"]) for event in events)
    end = max(float(event["ts"]) + float(event["dur"]) for event in events)
    busy, reached = 0.0, begin
    for first, last in spans:
        busy += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return busy / (end - begin)


def table(
    steps: Mapping[str, Step], sizes: OmniSizes, workload: Workload, item_bytes: int, chip: Chip
) -> list[str]:
    """A row a stage."""
    head = ["stage", "batch", "ms a step", "floor ms", "bound by", "GB read", "Gop"]
    head += ["step / floor", "rest: kernels ms", "rest: host and gaps ms"]
    rows = []
    for stage in STAGES:
        if stage in steps:
            step = steps[stage]
            floor = floor_of(stage, sizes, step, workload, item_bytes)
            rows.append([stage, *_cells(step, floor, chip)])
    return markdown(head, rows)


def _cells(step: Step, floor: Floor, chip: Chip) -> Sequence[str]:
    least_s, kernel_s = floor.seconds(chip), step.kernel_s
    above = "-" if kernel_s is None else f"{1000 * max(0.0, kernel_s - least_s):.2f}"
    gaps = f"{1000 * (step.step_s - least_s):.2f} in all"
    if kernel_s is not None:
        gaps = f"{1000 * max(0.0, step.step_s - max(kernel_s, least_s)):.2f}"
    return (
        f"{step.batch:.1f}",
        f"{1000 * step.step_s:.2f}",
        f"{1000 * least_s:.3f}",
        floor.bound(chip),
        f"{floor.bytes_read / 1e9:.3f}",
        f"{floor.operations / 1e9:.1f}",
        f"{step.step_s / least_s:.1f}",
        above,
        gaps,
    )


def _pass(size: DecoderSize, rows: float, keys: float, item_bytes: int) -> Floor:
    """One pass of a decoder over a row of each of some sequences, scores included."""
    touched = 0.0
    if size.experts:
        touched = size.experts * (1 - (1 - size.chosen / size.experts) ** rows)
    experts = size.mixed_layers * size.expert
    cache = 2 * size.layers * size.kv_heads * size.head_dim * keys * rows
    moved = size.every_row + touched * experts + size.table + cache
    products = size.every_row + size.chosen * experts + size.table
    attended = 2 * size.layers * size.heads * size.head_dim * keys
    return Floor(moved * item_bytes, 2 * rows * (products + attended))
