"""Operator tools on top of the SDK: `quill batch` and `quill top`."""
