"""Structured output: constraints compile to grammars, whose matchers mask tokens."""
