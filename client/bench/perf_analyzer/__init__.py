"""perf_analyzer against a pipeline: recipes that run it, and what its exports say in our measures.

<pipeline>.json ─► recipe ─► perf_analyzer ─► export ─► figures ─► table
                     gRPC stream, HTTP infer, HTTP generate_stream
"""
