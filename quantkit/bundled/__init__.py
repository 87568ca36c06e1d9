"""What travels with the package: `demo`, `demo-draft`, `demo-experts`, a calibration text and a held-out text."""

from pathlib import Path

_HERE = Path(__file__).parent
CALIBRATION_TEXT = _HERE / "text" / "calibration.txt"
HELDOUT_TEXT = _HERE / "text" / "heldout.txt"
