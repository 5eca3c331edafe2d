"""Servers that the load test starts, processes that it samples, the machine."""
