"""Which names mean this machine."""

from __future__ import annotations

import ipaddress


def host_name(header: str) -> str:
    """`example.org` of `example.org:8000`, `::1` of `[::1]:8000`; in small letters."""
    given = header.strip().lower()
    if given.startswith("["):
        return given[1:].partition("]")[0]
    name, _, port = given.rpartition(":")
    return name if port.isdecimal() else given


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
