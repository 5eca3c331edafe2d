"""Steps: from batches to a trained network."""
