"""Parts of the soak (`tests/long/test_soak.py`): what is asked, who asks, who kills, and what must be as before."""
