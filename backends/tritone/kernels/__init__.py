"""Kernels in Triton (the language, https://triton-lang.org) for steps of few rows, and for prompts, on a GPU.

Nobody imports them who does not run them: `triton` comes with torch for CUDA. Set TRITON_INTERPRET=1 before
the import and they run on a CPU, slowly. In shapes: R rows, H hidden size, V vocabulary, D size of a head.

Those of steps can be launched before the one ahead of them has ended (launch.py).
"""
