"""How a pipeline comes together, for a reader: config.pbtxt to pipeline to stage to engine."""

from __future__ import annotations

from pathlib import Path

from tritone import repository
from tritone.deploy import Deploy
from tritone.pipeline import Batching, Checkpoint

DOOR_OF = {Batching.ENGINE: "tritone_engine", Batching.TRITON: "tritone_batch"}


def chain(deploy: Deploy, folder: Path) -> list[str]:
    """A line each."""
    pipeline = deploy.pipeline
    lines = [
        f"{pipeline.name}: {pipeline.doc}",
        f"  deploy      {folder / repository.DEPLOY}  digest {deploy.digest}",
    ]
    if pipeline.checkpoint is not Checkpoint.NONE:
        lines.append(f"  checkpoint  {deploy.checkpoint}")
    rows = [
        (f"{name}/config.pbtxt", "tritone_pipeline", f"pipeline {pipeline.name}", note)
        for name, note in ((pipeline.name, "decoupled"), (f"{pipeline.name}_sync", "whole answers"))
    ]
    for stage in pipeline.stages:
        settings = deploy.stage(stage.name)
        engine = stage.engines[settings.engine]
        where = f"{settings.instances} x {settings.placed}" + (
            f", shares process '{settings.colocate}'" if settings.colocate else ""
        )
        rows.append(
            (
                f"{settings.model}/config.pbtxt",
                DOOR_OF[stage.batching],
                f"stage {stage.name} ({stage.execution})",
                f"{settings.engine} = {engine}, {where}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        lines.append(
            "  "
            + " -> ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        )
    lines += [f"  edge        {edge.source} -> {edge.target}" for edge in pipeline.edges]
    lines += [f"  final       {modality} <- {place}" for modality, place in pipeline.finals.items()]
    return lines
