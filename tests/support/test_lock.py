from lock import pins


def test_pins_hold_for_other_machines() -> None:
    frozen = """
torch==2.13.0+cpu
Jinja2==3.1.6
pip==23.2.1
-e git+ssh://host/repository@1234#egg=quantkit
local @ file:///wheels/local-1.0-py3-none-any.whl
absl-py==2.5.1
# Editable install with no version control (quantkit==0.1.0)
"""
    assert pins(frozen) == ["absl-py==2.5.1", "Jinja2==3.1.6", "torch==2.13.0"]
