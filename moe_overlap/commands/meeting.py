"""Rendezvous stores of `--nproc-per-node` that listen on one address, not on all interfaces.

torch's stores listen on every interface without a password, and torch's agent unpickles data from them: anyone who reaches the
port can run code. The stores of this file are bound to the address that the other processes use:
1. one machine: 127.0.0.1; the sockets of gloo and NCCL are on the loopback interface, too (`LOOPBACK`);
2. several machines: the address of `--rdzv-endpoint` or `--master-addr`. If that name resolves to the loopback interface (Debian
   maps a machine's own name to 127.0.1.1), or to an address of another device (NAT), the store listens on all interfaces.

`register` adds a rendezvous to torch's agent that differs from torch's `c10d` and `static` only in these stores.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import socket
import sys
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

BACKEND = "bound"
"""The name of this rendezvous in torch's agent; with `rank` among its settings it is static."""
THIS_MACHINE = "127.0.0.1"
"""The address of a job on one machine; not a name, because a machine's own name may not resolve."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Default variables for the sockets between ranks of one machine."""
STORE_SECONDS = datetime.timedelta(seconds=60)
"""Timeout of a store during the rendezvous, as in torch."""


def register() -> None:
    """Register BACKEND with torch's agent; once per process."""
    rendezvous_handler_registry.register(BACKEND, _handler)


def stay_on_this_machine() -> None:
    """Keep the sockets of the ranks of one machine on its loopback interface."""
    for name, interface in LOOPBACK.items():
        os.environ.setdefault(name, interface)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on a host's address; port 0 takes a free one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    places = [address, ("", *address[1:])]
    # A name that resolves to the loopback interface here resolves to another address on other machines.
    if ipaddress.ip_address(address[0]).is_loopback and host != THIS_MACHINE:
        places = places[1:]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listening.bind(places[0])
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or len(places) == 1:
                raise
            listening.bind(places[1])
        listening.listen(socket.SOMAXCONN)
    except OSError:
        listening.close()
        raise
    return listening


def listening_store(host: str, port: int, machines: int | None = None) -> TCPStore:
    """A store of this process that listens on a host's address.

    Args:
        machines: number of machines to wait for; None: no wait.
    """
    listening = listening_socket(host, port)
    # The store takes ownership of the descriptor.
    return TCPStore(
        host,
        listening.getsockname()[1],
        machines,
        is_master=True,
        timeout=STORE_SECONDS,
        master_listen_fd=listening.detach(),
    )


class _Numbering(C10dRendezvousBackend):
    """torch's backend of machines that number themselves, with the name BACKEND."""

    @property
    def name(self) -> str:
        return BACKEND


class _Numbered(StaticTCPRendezvous):
    """torch's rendezvous of numbered machines, with the name BACKEND; the first machine hosts the store."""

    _store: Store | None

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and not self._store:
            self._store = listening_store(self.master_addr, self.master_port, self.world_size)
        return super().next_rendezvous()


def _handler(params: RendezvousParameters) -> RendezvousHandler:
    return _static(params) if "rank" in params.config else _dynamic(params)


def _dynamic(params: RendezvousParameters) -> RendezvousHandler:
    """Machines that number themselves: the machine of the endpoint hosts the store, the others connect to it."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=0)
    store = _store_of(host, port) if _matches_machine_hostname(host) else _connected(host, port)
    handler: Any = create_handler(store, _Numbering(store, params.run_id), params)
    # The agent uses this function to create the store for the ranks of all machines.
    handler._create_tcp_store_server = listening_store
    return handler  # type: ignore[no-any-return]


def _store_of(host: str, port: int) -> Store:
    try:
        return listening_store(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Another agent of this machine already hosts it.
        return _connected(host, port)


def _connected(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=STORE_SECONDS)


def _static(params: RendezvousParameters) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=0)
    rank, seconds = int(params.config["rank"]), int(params.config["timeout"])
    return _Numbered(host, port, rank, params.max_nodes, params.run_id, seconds)
