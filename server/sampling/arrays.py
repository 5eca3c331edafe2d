"""The kinds of numbers that tokens are chosen by.

Knows: numpy's types. Does not know: shapes, which the suffixes of names tell.
"""

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]  # as the graph gives them
Hidden = npt.NDArray[np.float32]  # last hidden states, and vectors made of them
Scores = npt.NDArray[np.float64]  # what is computed from them, and the settings beside them
Ids = npt.NDArray[np.int64]  # tokens, and rows
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Mask = npt.NDArray[np.uint32]  # a bit for each token that may be chosen, the lowest first
