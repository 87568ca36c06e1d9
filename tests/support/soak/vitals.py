"""What a process holds, as Linux counts it: memory, handles, threads, children, connections."""

import os
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Vitals:
    handles: int
    threads: int
    resident: int  # bytes

    @classmethod
    def of(cls, pid: int) -> "Vitals":
        process = Path(f"/proc/{pid}")
        resident = int((process / "statm").read_text().split()[1]) * _PAGE
        return cls(len([*(process / "fd").iterdir()]), len([*(process / "task").iterdir()]), resident)


def living_children(pid: int) -> list[int]:
    """Of a process' first thread, the youngest last."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if is_alive(int(child))]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def is_held(server_port: int, client_port: int) -> bool:
    """Whether the server still has a handle of its end of a connection; what the kernel alone keeps has no inode."""
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *fields = row.split()
        if (_port(local), _port(remote)) == (server_port, client_port):
            return fields[6] != "0"
    return False


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
