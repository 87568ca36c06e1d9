"""The kernel tests under NVIDIA's compute-sanitizer: `make test-sanitizer`, see `__main__.py`."""
