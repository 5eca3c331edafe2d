"""The network, tokenizer, corpora, training, import of checkpoints.

Imports no other package of Quill, and nothing before a module is imported.
"""
