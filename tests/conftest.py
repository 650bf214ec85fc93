"""What every test may rely on."""

import signal

# A job in the background of a shell starts with SIGINT ignored, and its children inherit that: tests that
# interrupt a program would then wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
