"""Licence screening: turn what a package says about itself into an SPDX identifier, or None when in doubt."""

from __future__ import annotations

import re

# Short names as they occur in Debian copyright files, PyPI metadata and npm metadata -> SPDX identifier.
# Order matters: the first pattern that matches the whole name wins.
PERMISSIVE: list[tuple[str, str]] = [
    (r"(mit|expat|mit[ /-]?expat|the mit license|mit license|mit-license|mit\.)( \(.*\))?", "MIT"),
    (r"(the )?(modified |new |revised )?bsd[ -]?(2|2-clause|simplified|freebsd)( license)?(\.txt)?", "BSD-2-Clause"),
    (r"freebsd|simplified[ -]bsd", "BSD-2-Clause"),
    (
        r"(the )?(3-clause |modified |new |revised )?bsd([ -]?(3|3-clause|new|modified|style|like))?"
        r"( or 3-clause)?( license)?( \(.*\))?",
        "BSD-3-Clause",
    ),
    (r"(the )?bsd[ -]?[23]?-?clause[ -].*", "BSD-3-Clause"),
    (r"bsd-3-.*|new bsd.*|3-clause bsd.*|bsd.?3.?clause.*", "BSD-3-Clause"),
    (r"0bsd", "0BSD"),
    (
        r"(the )?apache([ -]?(software )?)?(license)?,?( |-)?(version |v)?\.?(2|2\.0)?( license| software license)?",
        "Apache-2.0",
    ),
    (r"asl[ -]?2(\.0)?|al2|apache[- ]?(license)?[- ]?2(\.0)?( with llvm.*)?|apache license.*2\.0.*", "Apache-2.0"),
    (r"psf(-2(\.0)?)?( license)?|python(-2\.0(\.1)?)?|python software foundation license|psfl|psf-license", "PSF-2.0"),
    (r"postgresql( license)?", "PostgreSQL"),
    (r"isc(l| license.*)?( \(iscl\))?", "ISC"),
    (r"(bsl|boost)([ -]?(software license|1(\.0)?))*([ -]?1\.0)?", "BSL-1.0"),
    (r"unlicense|the unlicense( \(unlicense\))?", "Unlicense"),
    (r"public[ -]domain|pd", "LicenseRef-public-domain"),
    (r"cc0(-?1(\.0)?)?|cc0 1\.0 universal.*|creative commons zero.*", "CC0-1.0"),
    (r"cc[- ]?by[- ]?3(\.0)?", "CC-BY-3.0"),
    (r"cc[- ]?by[- ]?4(\.0)?", "CC-BY-4.0"),
    (r"go", "BSD-3-Clause"),
    (r"apache-2-llvm-exceptions", "Apache-2.0"),
]
# Copyleft or restricted: a package with such files is taken only when they are build or test files, never text.
RESTRICTED = re.compile(
    r"gpl|gfdl|mpl|by-sa|by-nc|by-nd|noderivs|artistic|epl|cddl|eupl|cecill|sspl|proprietary|non-?free", re.IGNORECASE
)
INFRASTRUCTURE = re.compile(
    r"test|cmake|m4|config|ltmain|install-sh|build|tools|script|vendor|third|font|contrib|\.js|\.css|debian|bench|example"
    r"|github|packaging|jquery|theme|_static|depcomp|missing|makefile",
    re.IGNORECASE,
)


def spdx(name: str) -> str | None:
    """The SPDX identifier of one licence name, or None when it is not a permissive licence known here."""
    text = re.sub(r"\s+", " ", name.strip().lower()).strip(" .")
    for pattern, identifier in PERMISSIVE:
        if re.fullmatch(pattern, text):
            return identifier
    return None


def expression(text: str) -> str | None:
    """SPDX of a licence expression: every part joined by `and` must be permissive, one part of an `or` is enough."""
    parts: list[str] = []
    for term in re.split(r"\s+and\s+|\s*[,;&]\s*", re.sub(r"[()]", "", text), flags=re.IGNORECASE):
        choices = [spdx(choice) for choice in re.split(r"\s+or\s+|/", term, flags=re.IGNORECASE)]
        found = next((choice for choice in choices if choice), None)
        if found is None:
            return None
        if found not in parts:
            parts.append(found)
    return " AND ".join(parts) or None


def debian(copyright_text: str) -> str | None:
    """Licence of a Debian package's upstream files from its machine-readable copyright file, else None."""
    if "format:" not in copyright_text[:600].lower():
        return None
    main: str | None = None
    for stanza in re.split(r"\n\s*\n", copyright_text):
        files = re.search(r"^Files:(.*(?:\n[ \t].*)*)", stanza, re.MULTILINE | re.IGNORECASE)
        licence = re.search(r"^License:[ \t]*(.*)", stanza, re.MULTILINE | re.IGNORECASE)
        if files is None or licence is None:
            continue
        patterns = files[1].split()
        if patterns and all(pattern.startswith("debian/") for pattern in patterns):
            continue
        found = expression(licence[1])
        if "*" in patterns:
            if found is None:
                return None
            main = found
        elif (
            found is None
            and RESTRICTED.search(licence[1])
            and not all(INFRASTRUCTURE.search(pattern) for pattern in patterns)
        ):
            return None
    return main


def pypi(info: dict[str, object]) -> str | None:
    """Licence of a PyPI project from its metadata: the SPDX expression first, then classifiers, then free text."""
    if info.get("license_expression"):
        return expression(str(info["license_expression"]))
    named = [str(c).split("::")[-1].strip() for c in info.get("classifiers") or [] if str(c).startswith("License")]  # type: ignore[attr-defined]
    named = [n for n in named if n != "OSI Approved"]
    if named:
        found = [spdx(re.sub(r" License$", "", n)) or spdx(n) for n in named]
        return " AND ".join(sorted({f for f in found if f})) if all(found) else None
    text = str(info.get("license") or "").strip()
    return expression(text) if text and len(text) < 80 else None
