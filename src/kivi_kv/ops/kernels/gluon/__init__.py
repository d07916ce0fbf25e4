"""Decode attention for NVIDIA GPUs in Gluon, where layouts, shared memory and copies are explicit."""
