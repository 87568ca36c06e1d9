"""`make lock`: what `pip freeze --all` says, on standard input, as pins that other machines can install."""

import re
import sys

# One line of `pip freeze`. A local version (`2.13.0+cpu`) says which index a package came from: the pin leaves it out.
_PIN = re.compile(r"^([\w.-]+)==([^+\s]+)(?:\+\S+)?$")
_LEFT_OUT = {"pip", "quantkit"}
HEAD = "# Written by `make lock`: what `make` installs and CI runs with. constraints.txt has what is chosen by hand."


def pins(frozen: str) -> list[str]:
    """Refuses nothing: lines that are no pins, such as paths of this machine, are left out."""
    found = (_PIN.match(line.strip()) for line in frozen.splitlines())
    kept = {match[1].lower(): f"{match[1]}=={match[2]}" for match in found if match and match[1] not in _LEFT_OUT}
    return [kept[name] for name in sorted(kept)]


if __name__ == "__main__":
    print("\n".join([HEAD, *pins(sys.stdin.read())]))
