"""What holds where nobody says otherwise: the same for `quantkit.quantize`, the command line and measurements."""

DEVICE = "auto"  # a GPU where there is one
SHARD_MB = 1000  # the largest weight file to write; one is in memory twice while it is written
SHARD_BYTES = SHARD_MB * 1_000_000
QUALITY_WINDOWS = 8  # of held-out text that a new checkpoint is measured on
WINDOW = 1024  # tokens that one window of text has, for every measurement of quality
COMPARED_WINDOWS = 8  # on which `eval` compares a model with its base
