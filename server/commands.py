"""The commands of this package and their arguments.

Imports nothing heavy: `--help` must answer at once.
Each command names the function that does the work as `module:function`.
"""

from quill.server.cli.arguments import Subparsers
from quill.server.cli.client_commands import add_client_commands
from quill.server.cli.cluster_options import add_cluster
from quill.server.cli.serve_options import add_serve


def register(subparsers: Subparsers) -> None:
    add_serve(subparsers)
    add_client_commands(subparsers)
    add_cluster(subparsers)
