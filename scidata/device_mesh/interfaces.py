"""Which network interface gloo should use, where it would take the loopback one.

gloo listens at the address that the host's name resolves to. Where that is no address of the host, or 127.0.1.1 as
Debian writes into ``/etc/hosts``, it takes the loopback interface, which ranks on other hosts cannot reach.
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import socket
import struct

_ANYWHERE = "192.0.2.1"  # of no host (RFC 5737): where the default route leads
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def interface_for(address: str, *, several_hosts: bool) -> str | None:
    """Return the interface on the way to ``address``, where gloo would choose loopback; None where it need not know.

    ``address``: of rank 0's host; nothing is sent there.
    ``several_hosts``: whether ranks are on other hosts, so that the loopback interface will not do even on rank 0's
    own.
    """
    if not _is_loopback(_address_of_name()):
        return None
    local = _source_towards(address)
    if several_hosts and _is_loopback(local):
        local = _source_towards(_ANYWHERE)
    return None if _is_loopback(local) else _interface_of(local)


def _is_loopback(address: str | None) -> bool:
    return address is None or ipaddress.ip_address(address).is_loopback


def _address_of_name() -> str | None:
    """Return the address that gloo takes: the first one of the host's name at which this host can listen."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as listener:
                listener.bind(place)
                return str(place[0])
    return None


def _source_towards(address: str) -> str | None:
    """Return the local address from which packets would leave."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sender:
                sender.connect(place)
                return str(sender.getsockname()[0]).partition("%")[0]
    return None


def _interface_of(local: str | None) -> str | None:
    with contextlib.suppress(OSError, ImportError):
        import fcntl  # not on Windows

        wanted = None if local is None else ipaddress.ip_address(local)
        if wanted is not None and wanted.version == 6:
            with open("/proc/net/if_inet6", encoding="ascii") as file:
                lines = [line.split() for line in file]
            return next((words[5] for words in lines if bytes.fromhex(words[0]) == wanted.packed), None)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                request = array.array("B", struct.pack("256s", name.encode()[:15]))
                with contextlib.suppress(OSError):  # an interface without an address
                    fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                    if socket.inet_ntoa(request[20:24].tobytes()) == local:
                        return name
    return None
