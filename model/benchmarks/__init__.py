"""Benchmarks that people know, on PyTorch or on a server: `quill eval --tasks`."""
