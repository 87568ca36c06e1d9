"""From a model and a recipe to a checkpoint: block by block, safe against crashes, verified and measured.

job.py         everything that can be refused is refused, before anything is written
run.py         one decoder block after the other into the journal; a killed run goes on here
writing.py     journal and source become a checkpoint: read back, compared, measured, then given its name
"""

from quantkit.pipeline.run import quantize

__all__ = ["quantize"]
