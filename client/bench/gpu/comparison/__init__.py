"""Our server and a peer's on one machine, asked the same: the parts of client/bench/gpu/end_to_end.py."""
