"""OpenStack Swift on loopback, with its S3 interface behind faults; prints the address of that.

PYTHONPATH=tests python -m programs.swift_server DIRECTORY

One process each for the proxy and the account, container and object server; the rings between them
name one device and one replica. The directory is empty, on a file system with extended attributes.
All end when the standard input does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from eventlet import greenio
from swift.common import utils, wsgi
from swift.common.ring import RingBuilder

STORAGE = ("account", "container", "object")
COMMON = """
[swift-hash]
swift_hash_path_prefix = prefix
swift_hash_path_suffix = suffix
[storage-policy:0]
name = only
default = yes
"""
PROXY = """
[DEFAULT]
swift_dir = {directory}
[pipeline:main]
pipeline = faults catch_errors gatekeeper listing_formats bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
node_timeout = 60
recoverable_node_timeout = 60
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:faults]
paste.filter_factory = support.faulty_store:filter_factory
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""
BACKEND = """
[DEFAULT]
swift_dir = {directory}
devices = {directory}/devices
mount_check = false
fallocate_reserve = 0
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
container_update_timeout = 60
"""


def make_ring(directory: Path, kind: str, port: int) -> None:
    """Write the ring of one server: a single device, a single replica."""
    builder = RingBuilder(part_power=2, replicas=1, min_part_hours=0)
    device = {"region": 1, "zone": 1, "weight": 1, "device": "sda", "ip": "127.0.0.1", "port": port}
    builder.add_dev({**device, "replication_ip": "127.0.0.1", "replication_port": port})
    builder.rebalance()
    builder.get_ring().save(str(directory / f"{kind}.ring.gz"))


def configure(directory: Path) -> dict[str, socket.socket]:
    """Write all that Swift reads; returns a socket for each server."""
    (directory / "devices" / "sda").mkdir(parents=True)
    (directory / "swift.conf").write_text(COMMON)
    sockets = {kind: socket.create_server(("127.0.0.1", 0)) for kind in (*STORAGE, "proxy")}
    for kind, server in sockets.items():
        pattern = PROXY if kind == "proxy" else BACKEND
        text = pattern.format(directory=directory, kind=kind)
        (directory / f"{kind}-server.conf").write_text(text)
        if kind != "proxy":
            make_ring(directory, kind, server.getsockname()[1])
    return sockets


def serve(directory: Path, kind: str, server: socket.socket, ready: int) -> None:
    utils.monkey_patch()
    conf = wsgi.appconfig(str(directory / f"{kind}-server.conf"), name=f"{kind}-server")
    patched = greenio.GreenSocket(server)
    say = partial(os.write, ready, b".")
    wsgi.run_server(conf, utils.get_logger(conf, kind), patched, ready_callback=say)


def start(directory: Path, kind: str, server: socket.socket) -> int:
    """Start a process with one server, and wait until it answers; returns the process's id."""
    is_ready, ready = os.pipe()
    process = os.fork()
    if not process:
        try:
            serve(directory, kind, server, ready)
        finally:
            os._exit(1)
    os.close(ready)
    assert os.read(is_ready, 1), f"Swift's {kind} server did not start"
    os.close(is_ready)
    return process


def main(directory: Path) -> None:
    sockets = configure(directory)
    processes = []
    try:
        for kind, server in sockets.items():
            processes.append(start(directory, kind, server))
        sys.stdout.write(f"http://127.0.0.1:{sockets['proxy'].getsockname()[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


if __name__ == "__main__":
    utils.SWIFT_CONF_FILE = f"{sys.argv[1]}/swift.conf"
    main(Path(sys.argv[1]))
