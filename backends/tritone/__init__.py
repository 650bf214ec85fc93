"""Tritone: omni-modality models as stage pipelines on NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
