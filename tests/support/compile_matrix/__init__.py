"""Every kernel, compiled for cards that are not here: `python -m compile_matrix`, see `__main__.py`."""
