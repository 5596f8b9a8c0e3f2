"""Network interfaces: which one gloo takes, and whether other nodes could reach it."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator

from fds.command_line.doctor.finding import Finding, Settings

ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux's netdevice(7)


def network(settings: Settings) -> Iterator[Finding]:
    """Find the interfaces, and the one that gloo takes: that of GLOO_SOCKET_IFNAME, or of the host's own name."""
    interfaces = {name: address(name) for _, name in socket.if_nameindex()}
    shown = ", ".join(f"{name} {at}" if at else name for name, at in interfaces.items())
    values = {"addresses": interfaces}
    if sys.platform == "linux" and not any(interfaces.values()):
        yield Finding("interfaces", f"none with an address: {shown}", "problem", "ip link set lo up", values)
    else:
        yield Finding("interfaces", shown or "none", values=values)
    yield gloo_interface(interfaces, os.environ.get("GLOO_SOCKET_IFNAME", ""))


def gloo_interface(interfaces: dict[str, str], wanted: str) -> Finding:
    """Return the finding of the interface that gloo takes, given all (name -> IPv4 address) and the wanted names."""
    others = [name for name, at in interfaces.items() if at and not at.startswith("127.")]
    instead = f"export GLOO_SOCKET_IFNAME={others[0] if others else 'INTERFACE'}"
    if wanted:
        missing = [name for name in wanted.split(",") if name not in interfaces]
        if missing:
            advice = f"there is no such interface; {instead}, or unset it"
            return Finding("gloo", f"GLOO_SOCKET_IFNAME={wanted}", "problem", advice)
        return Finding("gloo", f"takes {wanted}, of GLOO_SOCKET_IFNAME")
    host = socket.gethostname()
    several = f"on several nodes: {instead} (and NCCL_SOCKET_IFNAME)"
    if not others:
        several = "other nodes cannot be reached: no interface but the loopback has an address"
    try:
        at = socket.gethostbyname(host)
    except OSError:
        return Finding("gloo", f"takes the loopback: the name {host} has no address", "note", several)
    name = next((name for name, one in interfaces.items() if one == at), "")
    if at.startswith("127."):
        return Finding("gloo", f"takes the loopback: {host} is {at}", advice=several)
    if not name:
        return Finding("gloo", f"{host} is {at}, which no interface has", "note", instead)
    return Finding("gloo", f"takes {name}: {host} is {at}")


def address(interface: str) -> str:
    """Return the IPv4 address of an interface; empty where it has none, and on other systems than Linux."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            found = fcntl.ioctl(s.fileno(), ADDRESS_OF, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])
