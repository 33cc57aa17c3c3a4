"""Drop 04: the loop of a pipeline stage, and how little of the time each stage works."""

from .practice import judge, loop, pipeline
from .shown import timed_step, together, working
