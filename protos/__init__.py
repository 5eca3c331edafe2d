"""The shape of what crosses the wire. generation.proto is the source; the rest is made from it."""
