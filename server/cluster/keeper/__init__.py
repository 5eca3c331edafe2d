"""What the replicas of a cluster must agree on: keys' limits, and whose turn it is to reload."""
