"""The subcommands of this room and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each subcommand names the function that does the work as `module:function`.
"""

from quill.server.cli.argument_types import Subparsers
from quill.server.cli.cluster_options import add_cluster
from quill.server.cli.embed_options import add_embed, add_fill
from quill.server.cli.fleet_options import add_batch, add_top
from quill.server.cli.generate_options import add_chat, add_generate
from quill.server.cli.operator_options import add_keys, add_operating
from quill.server.cli.serve_options import add_serve


def register(subparsers: Subparsers) -> None:
    """Adds this room's subcommands to the front door."""
    add_serve(subparsers)
    add_generate(subparsers)
    add_chat(subparsers)
    add_embed(subparsers)
    add_fill(subparsers)
    add_batch(subparsers)
    add_keys(subparsers)
    add_operating(subparsers)
    add_top(subparsers)
    add_cluster(subparsers)
