"""The only modules that import Locust, which patches the process."""
