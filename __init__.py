"""Quill: train a Transformer, export it to ONNX with a key/value cache, serve it over gRPC.

ONNX Runtime tells its maker nothing, unless a person wishes it to. Since 1.31 it writes an id of
the machine and a list of events into the user's cache, and looks up a host of its maker's. Its
`disable_telemetry_events()` comes too late: importing it is enough for the files. So this is said
before anything of ours is imported, in the environment, for child processes as well.
"""

import os

# ORT_DISABLE_TELEMETRY=0, said by a person, leaves it on.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
