"""Tiny random checkpoints for tests: the miniature's builder, under the name the tests use."""

from twinreel.demo.tiny import tiny_spec, write_tiny
from twinreel.demo.tiny_weights import tiny_tensors

__all__ = ["tiny_spec", "tiny_tensors", "write_tiny"]
