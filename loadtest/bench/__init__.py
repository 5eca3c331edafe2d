"""Benchmarks: experiments of backends × workloads × columns."""
