"""The import of GGUF files and Hugging Face models."""
