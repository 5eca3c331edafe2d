"""What every test of this room runs under."""

import torch

# The networks here are tiny. On a busy machine, threads that wait for each other make the same
# tests ten times slower: 100 s against 9 s for test_transformer.py.
torch.set_num_threads(1)
