"""The manifest: what is written is read back, and what is damaged is refused in words."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quill.export.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    File,
    Graphs,
    Invariance,
    Manifest,
    Sizes,
    SpecialTokens,
    Verification,
    check_files,
    describe_file,
    read_manifest,
    write_manifest,
)
from quill.export.errors import BundleError

SIZES = Sizes(
    vocab_size=272,
    context=96,
    d_model=64,
    num_layers=2,
    num_encoder_layers=0,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    d_ff=96,
    num_parameters=1000,
)
GRAPHS = Graphs(
    precision="fp32",
    device="cpu",
    decoder="decoder.fp32.onnx",
    encoder=None,
    weights="weights.fp32.bin",
    cache_type="float32",
    quantization=None,
    verification=Verification(
        worst_difference=1e-5,
        greedy_agreement=1.0,
        perplexity=12.5,
        reference_perplexity=12,
        text="a book",
        num_tokens=4080,
        step_ms=7.25,
    ),
    invariance=Invariance(holds=True, rows=(1, 2), num_cut_tokens=300),
)


def make_bundle(directory: Path) -> Manifest:
    """Real files with a manifest; what is in them doesn't matter here."""
    directory.mkdir(exist_ok=True)
    names = ("decoder.fp32.onnx", "weights.fp32.bin", "tokenizer.json")
    for name in names:
        (directory / name).write_bytes(name.encode() * 10)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name="tiny",
        family="causal",
        onnxruntime="1.31.1",
        sizes=SIZES,
        special_tokens=SpecialTokens(bos=None, eos=2, pad=None, unk=None),
        prepend_bos=False,
        stop_ids=(2, 3),
        chat_template="{{ messages }} — ☃",
        generation={"temperature": 0.6, "top_k": 40},
        provenance={"source": "nowhere", "sha256": {"a": "b"}},
        tokenizer="tokenizer.json",
        graphs=(GRAPHS,),
        files=tuple(describe_file(directory, name) for name in names),
    )
    write_manifest(directory, manifest)
    return manifest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


def change(bundle: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = bundle / MANIFEST_FILE
    value = json.loads(path.read_text(encoding="utf-8"))
    edit(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path)
    assert read_manifest(tmp_path) == manifest
    check_files(tmp_path, manifest)


def test_a_bundle_made_before_weights_were_recorded_is_read(bundle: Path) -> None:
    change(bundle, lambda m: (m.pop("weights_sha256"), m.pop("left_out")))
    manifest = read_manifest(bundle)
    assert (manifest.weights_sha256, manifest.left_out) == (None, ())


def test_graphs_are_found_by_precision(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.graphs_in("fp32") == GRAPHS
    assert manifest.files_for(GRAPHS) == [file.name for file in manifest.files]
    with pytest.raises(BundleError, match=r"no quill4 graphs; it has fp32"):
        manifest.graphs_in("quill4")
    # Two vectors of each head and layer.
    assert manifest.cache_bytes_per_token("float32") == 2 * 2 * 2 * 16 * 4
    assert manifest.cache_bytes_per_token("float16") == 2 * 2 * 2 * 16 * 2


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer format": (lambda m: m.update(format_version=99), "format version 99; .* reads 4"),
    "slots": (lambda m: m.update(format_version=1), "format version 1; .* Export the bundle again"),
    "no format": (lambda m: m.pop("format_version"), "format version None"),
    "true for one": (lambda m: m.update(format_version=True), "format version True"),
    "no such token": (lambda m: m.update(stop_ids=[99999]), "a token 99999.* ends at"),
    "negative size": (lambda m: m["sizes"].update(head_size=-1), "sizes.head_size is -1"),
    "entry missing": (lambda m: m.pop("family"), "family is missing"),
    "entry unknown": (lambda m: m.update(colour="red"), "colour is unknown"),
    "deep entry missing": (lambda m: m["sizes"].pop("d_ff"), r"sizes\.d_ff is missing"),
    "wrong type": (lambda m: m["sizes"].update(d_ff="96"), r"sizes\.d_ff is '96'; .*whole number"),
    "true for a number": (lambda m: m["sizes"].update(d_ff=True), r"sizes\.d_ff is True"),
    "unknown family": (lambda m: m.update(family="rnn"), "family is 'rnn'; .*causal, seq2seq"),
    "no list": (lambda m: m.update(stop_ids=7), "stop_ids is 7; it must be a list"),
    "bad item": (lambda m: m.update(stop_ids=[2, None]), r"stop_ids\[1\] is None"),
    "not a number": (
        lambda m: m["generation"].update(temperature=float("nan")),
        r"generation\.temperature is nan",
    ),
    "no graphs": (lambda m: m.update(graphs=[]), "has no graphs"),
    "the same graphs twice": (lambda m: m["graphs"].append(m["graphs"][0]), "two of the same"),
    "encoder in causal": (
        lambda m: m["graphs"][0].update(encoder="decoder.fp32.onnx"),
        "causal has no encoder",
    ),
    "file not listed": (lambda m: m["files"].pop(0), r"uses decoder\.fp32\.onnx and doesn't list"),
    "file twice": (lambda m: m["files"].append(m["files"][0]), "lists a file twice"),
    "path upwards": (lambda m: m["files"][0].update(name="../decoder.onnx"), "plain file name"),
    "absolute path": (lambda m: m["files"][0].update(name="/etc/passwd"), "plain file name"),
    "path on Windows": (lambda m: m["files"][0].update(name="..\\x"), "plain file name"),
    "parent": (lambda m: m["files"][0].update(name=".."), "plain file name"),
    "null byte": (lambda m: m["files"][0].update(name="a\0b"), "plain file name"),
    "itself": (lambda m: m["files"][0].update(name=MANIFEST_FILE), "plain file name"),
    "line break in a file": (lambda m: m["files"][0].update(name="a\nb"), "plain file name"),
    "line break": (
        lambda m: m.update(name="a\nb"),
        r"names the bundle 'a\\nb'; .* no control characters",
    ),
    "escape": (lambda m: m.update(name="\x1b[2Ja"), "no control characters"),
    "escape of eight bits": (lambda m: m.update(name="\x9b2Ja"), "no control characters"),
    "line separator": (lambda m: m.update(name="a\u2028b"), "no control characters"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_refused_in_words(bundle: Path, damage: str) -> None:
    edit, message = DAMAGES[damage]
    change(bundle, edit)
    with pytest.raises(BundleError, match=message) as caught:
        read_manifest(bundle)
    assert str(caught.value).isprintable()


def test_a_name_may_have_letters_of_all_languages(bundle: Path) -> None:
    change(bundle, lambda m: m.update(name="Gänsekiel 羽ペン 🪶"))
    assert read_manifest(bundle).name == "Gänsekiel 羽ペン 🪶"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass")]
)
def test_what_is_no_manifest_at_all_is_refused(bundle: Path, text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    (bundle / MANIFEST_FILE).write_bytes(data)
    with pytest.raises(BundleError):
        read_manifest(bundle)


def test_a_directory_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there is no bundle"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=r"isn't a bundle: it has no manifest\.json"):
        read_manifest(tmp_path)
    for file in ("run.json", "config.json"):  # of a run or a checkpoint
        (tmp_path / file).touch()
        with pytest.raises(BundleError, match=f"quill export {tmp_path} --out"):
            read_manifest(tmp_path)
        (tmp_path / file).unlink()


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def make_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere.bin"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, r"weights\.fp32\.bin has the SHA-256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 159 bytes; .* have 160"),
        (Path.unlink, r"can't read .*weights\.fp32\.bin: No such file"),
        (make_a_directory, r"weights\.fp32\.bin is not a file"),
        (make_a_link, "outside of the bundle"),
    ],
    ids=["flipped byte", "cut short", "missing", "directory", "link out of the bundle"],
)
def test_a_damaged_file_is_caught_and_named(
    bundle: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(bundle / "weights.fp32.bin")
    with pytest.raises(BundleError, match=message):
        check_files(bundle, read_manifest(bundle))


def test_only_the_files_asked_for_are_checked(bundle: Path) -> None:
    (bundle / "tokenizer.json").unlink()
    check_files(bundle, read_manifest(bundle), ["decoder.fp32.onnx", "weights.fp32.bin"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def paths(value: object) -> list[tuple[str | int, ...]]:
    """The place of every entry."""
    children: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    return [(key, *rest) for key, child in children for rest in ((), *paths(child))]


@pytest.fixture(scope="module")
def spare_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("spare") / "bundle"
    make_bundle(bundle)
    return bundle


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_replaces_an_entry_is_read_or_refused_in_words(
    spare_bundle: Path, data: st.DataObject
) -> None:
    path = spare_bundle / MANIFEST_FILE
    before = path.read_text(encoding="utf-8")
    value = json.loads(before)
    place = data.draw(st.sampled_from(paths(value)))
    target = value
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = data.draw(JSON)
    path.write_text(json.dumps(value), encoding="utf-8")
    try:
        manifest = read_manifest(spare_bundle)
        write_manifest(spare_bundle, manifest)
        again = json.loads(path.read_text(encoding="utf-8"))
    except BundleError:
        return
    finally:
        path.write_text(before, encoding="utf-8")
    assert again == value, "the reader changed what it took, or took what has no place"


def test_reading_a_bundle_needs_neither_torch_nor_onnx(bundle: Path) -> None:
    """The server reads manifests; a serving machine has no torch."""
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnx_ir', 'onnxruntime', 'numpy', 'model'):\n"
        "    sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "import quill.export.bundle.graph_contract\n"
        "from quill.export.bundle.manifest import check_files, read_manifest\n"
        "check_files(Path(sys.argv[1]), read_manifest(Path(sys.argv[1])))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(bundle)], check=True)


def test_a_files_description_is_its_size_and_hash(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert describe_file(tmp_path, "abc") == File(
        name="abc",
        size=3,
        sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    )
