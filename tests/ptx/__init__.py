"""Run compiled kernels on a CPU, from their PTX: what a compiler made of them, program by program."""

from .launch import Emulator, emulated

__all__ = ["Emulator", "emulated"]
