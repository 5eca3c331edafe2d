"""ONNX Runtime tells its maker nothing, unless a person wishes it to. Imported by every room.

Knows: the runtime's own switch. Does not know: who imports the runtime, or when.

Since 1.31 the runtime writes an id of the machine and a list of events into the user's cache, and
looks up a host of its maker's. Its `disable_telemetry_events()` comes too late: importing it is
enough for the files. So this is said before, in the environment, for child processes as well.
"""

import os

# ORT_DISABLE_TELEMETRY=0, said by a person, leaves it on.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
