"""Measure what a cache costs in accuracy."""

from .fidelity import Scores, teacher_forced
from .texts import read_text

__all__ = ["Scores", "read_text", "teacher_forced"]
