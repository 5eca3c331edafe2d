"""What the network is: Transformer, tokenizer, corpora, training, other people's checkpoints.

Imports nothing of the other rooms, and nothing at all until a module is asked for.
"""
