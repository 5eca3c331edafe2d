"""Text: tokenizer, chat template, detokenizer, tool-call parser."""
