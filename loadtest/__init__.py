"""The crowd: Locust users, workloads, benchmarks, reports."""
