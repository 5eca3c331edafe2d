"""The crowd: Locust users, workloads, benchmarks, reports."""

import privacy as privacy
