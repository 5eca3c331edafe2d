"""The commands, and the tools that benchmarks start."""
