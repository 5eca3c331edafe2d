"""Servers that we start, processes that we watch, the machine."""
