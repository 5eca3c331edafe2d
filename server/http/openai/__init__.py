"""The paths that clients of OpenAI and vLLM know."""
