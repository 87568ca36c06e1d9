"""What travels with the package: the models `demo` and `demo-draft`, a calibration text and a held-out text."""

from pathlib import Path

_HERE = Path(__file__).parent
CALIBRATION_TEXT = _HERE / "text" / "calibration.txt"
HELDOUT_TEXT = _HERE / "text" / "heldout.txt"
