"""The HTTP frontend: OpenAI's JSON is parsed into requests, and outputs are printed as JSON."""
