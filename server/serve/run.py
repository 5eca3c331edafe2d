"""`quill serve`: from the command's arguments to a server that runs until a signal ends it.

Knows: settings, which source. Does not know: gRPC, engines, what a server consists of.
"""

import argparse
import asyncio
import sys

from quill.server.process.ports import check_free
from quill.server.process.supervisor import Supervisor
from quill.server.serve.prepare import prepared_bundle
from quill.server.settings import check_exposure, read_settings
from quill.server.telemetry.logs import set_up_logging


def run(args: argparse.Namespace) -> None:
    settings = read_settings(args)
    set_up_logging(settings.log_format)
    check_exposure(settings)
    check_free(settings)
    directory = prepared_bundle(args.source, settings.device, settings.precision)
    code = asyncio.run(Supervisor(directory, settings).run())
    if code:
        sys.exit(code if code > 0 else 128 - code)
