"""What cannot be imported."""

raise RuntimeError("needs a library\nthat is not there")
