"""`quill inspect`: shows what is in a bundle.

Knows: the manifest, the graphs' operators. Does not know: torch, how bundles are made.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from rich.console import Console
from rich.table import Table

from quill.export.bundle.manifest import Graphs, Invariance, Manifest, check_files, read_manifest
from quill.export.cli.speed import BATCH_SIZES, measure_baseline, measure_speed
from quill.export.errors import BundleError
from quill.export.operators.library import operators_problem


def run(args: argparse.Namespace) -> None:
    manifest = read_manifest(args.bundle)
    check_files(args.bundle, manifest)
    console = Console(highlight=False)
    console.print(_table(manifest.name, network(manifest)))
    for graphs in manifest.graphs:
        console.print(_table(graphs.precision, described(args.bundle, manifest, graphs)))
    if args.speed:
        console.print(speed_table(args.bundle, manifest))
    console.print("files, checked by SHA-256", style="italic")
    width = max((len(file.name) for file in manifest.files), default=0)
    for file in manifest.files:
        # As sha256sum prints it: not wrapped, so that a hash can be copied and compared.
        size = f"{file.size / 1e6:.2f} MB"
        console.print(f"{file.sha256}  {file.name:<{width}}  {size}", soft_wrap=True)


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def speed_table(directory: Path, manifest: Manifest) -> Table:
    """Tokens a second, and in brackets the share of the baseline, which is in float32: quantized
    weights are smaller and faster, so theirs may be far above 100%."""
    table = Table(title="tokens a second, and share of a matrix product", title_justify="left")
    table.add_column("precision")
    for size in BATCH_SIZES:
        table.add_column(f"batch of {size}", justify="right")
    table.add_column("prefill", justify="right")
    best = measure_baseline(manifest.sizes)
    problem = operators_problem()
    if manifest.family == "encoder":
        problem = "an encoder has no decode steps, so there is nothing to time"
    if problem is not None:
        table.caption = problem
    for graphs in manifest.graphs:
        if graphs.device == "cpu" and problem is None:
            speed = measure_speed(directory, manifest, graphs)
            steps = [_share(speed.decode[size], best.decode[size]) for size in BATCH_SIZES]
            table.add_row(graphs.precision, *steps, _share(speed.prefill, best.prefill))
    return table


def _share(found: float, best: float) -> str:
    return f"{found:.0f} ({found / best:.0%})"


def network(manifest: Manifest) -> list[tuple[str, str]]:
    """The rows that are the same in all precisions."""
    sizes = manifest.sizes
    layers = str(sizes.num_layers or sizes.num_encoder_layers)
    if manifest.family == "seq2seq":
        layers = f"{sizes.num_encoder_layers} encoder, {sizes.num_layers} decoder"
    stops = ", ".join(map(str, manifest.stop_ids)) or "none"
    return [
        ("family", manifest.family),
        ("parameters", f"{sizes.num_parameters:,}"),
        ("layers", layers),
        ("model size, feed-forward", f"{sizes.d_model}, {sizes.d_ff}"),
        ("heads", f"{sizes.num_heads}, K/V {sizes.num_kv_heads}, size {sizes.head_size}"),
        ("context", f"{sizes.context:,} tokens"),
        ("vocabulary", f"{sizes.vocab_size:,}"),
        ("tokenizer", manifest.tokenizer or "none: token ids only"),
        ("stop tokens", stops),
        ("chat template", "yes" if manifest.chat_template else "no"),
        ("generation defaults", _listed(manifest.generation)),
        ("provenance", _listed(manifest.provenance)),
        ("ONNX Runtime", manifest.onnxruntime),
    ]


def _listed(entries: Mapping[str, object]) -> str:
    lines = []
    for name, value in entries.items():
        if isinstance(value, Mapping):
            lines += [f"{name} of {key}: {each}" for key, each in value.items()]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines) or "none"


def described(directory: Path, manifest: Manifest, graphs: Graphs) -> list[tuple[str, str]]:
    """The rows of one precision."""
    per_token = manifest.cache_bytes_per_token(graphs.cache_type)
    sides = 2 if manifest.family == "seq2seq" else 1
    full = sides * per_token * manifest.sizes.context
    rows: list[tuple[str, str]] = [("meant for", graphs.device)]
    if full:  # an encoder has no KV cache
        per_context = f"{full / 1e6:.1f} MB ({per_token / 1e3:.1f} KB a token)"
        rows.append(("KV cache of a full context", per_context))
    rows.append(("quantization", graphs.quantization or "none"))
    rows += list(_verification(graphs))
    for role, name in (("decoder", graphs.decoder), ("encoder", graphs.encoder)):
        if name is not None:
            rows.append((f"{role}'s operators", _operators(directory / name)))
    return rows


def _verification(graphs: Graphs) -> Iterator[tuple[str, str]]:
    found = graphs.verification
    if found is None:
        yield "verified", "no"
        return
    yield "worst difference", f"{found.worst_difference:.2g} of the spread of logits"
    yield "top-1 agreement", f"{found.greedy_agreement:.2%} of positions"
    if found.kl_divergence is not None:
        yield "mean KL divergence", f"{found.kl_divergence:.5f} nats"
    if found.greedy_length is not None:
        yield "same greedy tokens", f"{found.greedy_length:.1f} on average, of up to 64"
    rise = found.perplexity / found.reference_perplexity - 1
    yield (
        "perplexity",
        f"{found.perplexity:.4f}, PyTorch's {found.reference_perplexity:.4f} ({rise:+.2%})",
    )
    yield "measured on", f"{found.num_tokens:,} tokens: {found.text}"
    yield "one step", f"{found.step_ms:.1f} ms"
    yield "batch invariance", _invariance(graphs.invariance)


def _invariance(found: Invariance | None) -> str:
    if found is None:
        return "not measured: it needs the device"
    if not found.holds:
        return "broken: a sequence's logits depend on what else is in the batch"
    sizes = ", ".join(map(str, found.rows))
    if not found.num_cut_tokens:
        return f"bit-identical for batches of {sizes}"
    return (
        f"bit-identical for batches of {sizes}, and for a prompt of {found.num_cut_tokens} tokens "
        "in chunks of any size"
    )


def _operators(path: Path) -> str:
    try:
        # With an explicit format: onnx would derive it from the name.
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise BundleError(f"{path} is no ONNX graph: {error}. Export the bundle again") from error
    counts = Counter(node.op_type for node in model.graph.node)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
