"""What the processor can do that a precision's speed depends on.

Knows: Linux's description of it. Does not know: models.
"""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
VNNI = {"avx512_vnni", "avx_vnni"}


def multiplies_integers(cpuinfo: Path = CPUINFO) -> bool:
    """Whether products of 8-bit integers are summed in 32 bits: fast, and without overflow.

    Elsewhere than on Linux it can't be told, and the answer is no.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return bool(VNNI & set(flags))
