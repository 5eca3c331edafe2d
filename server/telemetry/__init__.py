"""What is told afterwards: records, logs, metrics, spans."""
