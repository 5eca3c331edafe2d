"""What Ray is told by its environment, on every machine, before it starts.

Knows: Ray's names. Does not know: deployments, how Ray is started.
"""

import socket
from pathlib import Path

from quill.server.prefix_header import PREFIX_HASH_HEADER

# Beyond Ray's own worker ports, 10002 to 19999, and below those that Linux hands out by itself.
REPLICA_PORTS = (31001, 32000)
MAX_STREAMS = 1024  # of one connection, as on a single server
MARGIN_S = 60
_FIXED_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


# Calls that begin alike meet one replica, unless it has 1.25 times the mean of all calls; those
# that don't say how they begin take turns. Ray writes what is said here after `balance`, as it is.
_BALANCE = f"hdr({PREFIX_HASH_HEADER})\n    hash-type consistent\n    hash-balance-factor 125"


def ray_environment(
    longest_answer_s: float, drain_s: float, directory: Path | None = None
) -> dict[str, str]:
    """`directory`: for files of one cluster on one machine; None leaves them where Ray has them."""
    lasting_s = round(longest_answer_s) + MARGIN_S
    values = {
        # HAProxy in front of replicas, which take calls themselves.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": _BALANCE,
        # When replicas come or go, an old HAProxy goes on so long for the streams that it has.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(lasting_s),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{drain_s:g}",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(max(3600, lasting_s)),
        # A check may take as long as the time to the next one. On a busy machine a replica that
        # has 250 ms for its answer, as Ray wants it, is taken for dead. Those that are dead are
        # noticed by connections that fail.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "10s",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FASTINTER": "10s",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "3",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_RISE": "1",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_DOWNINTER": "1s",
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": str(MAX_STREAMS),
        "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS": str(MAX_STREAMS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(REPLICA_PORTS[0]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(REPLICA_PORTS[1]),
        # Replicas are what the machine is for; Ray would run them at niceness 15.
        "RAY_worker_niceness": "0",
        # Nobody joins the cluster without a token, and nothing is told to Ray's makers.
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return values if directory is None else values | _files(directory)


def is_free(host: str, port: int) -> bool:
    """For a moment, at least."""
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
    except OSError:
        return False
    return True


def free_port() -> int:
    """For a moment, at least."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def _files(directory: Path) -> dict[str, str]:
    """In /tmp, where Ray has them, every user of the machine could tell HAProxy what to do.

    Ports that Ray has as fixed numbers are free ones here: several clusters may be on a machine.
    """
    ports = {name: str(free_port()) for name in _FIXED_PORTS}
    return ports | {
        "RAY_AUTH_TOKEN_PATH": str(directory / "token"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
    }
