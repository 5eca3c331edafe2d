"""The application that Ray Serve deploys: `import_path: quill.server.cluster.app:build`.

Knows: of which deployments a cluster consists. Does not know: how many of each there are, where.
"""

from typing import Any

from ray import serve

from quill.server.cluster.keeper.keeper import Keeper
from quill.server.cluster.replica.options import read_options
from quill.server.cluster.replica.replica import Replica
from quill.server.cluster.serve_config import KEEPER, REPLICA


def build(args: dict[str, Any]) -> Any:
    keeper = serve.deployment(Keeper, name=KEEPER).bind()
    return serve.deployment(Replica, name=REPLICA).bind(read_options(args), keeper)
