"""Measure what a cache costs in accuracy."""

from .fidelity import Scores, teacher_forced

__all__ = ["Scores", "teacher_forced"]
