"""Quill's own operators: where their library is, and how it is built from kernels/."""
