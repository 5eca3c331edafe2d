"""Quill's custom operators: their library, and how it is built from kernels/."""
