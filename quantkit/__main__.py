"""`python -m quantkit` is the command line."""

from quantkit.cli import main

main()
