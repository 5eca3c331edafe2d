"""Load tests and benchmarks: Locust users, workloads, backends under test, reports."""
