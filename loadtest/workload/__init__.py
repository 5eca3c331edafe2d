"""What is asked, when, how it is sent, and what became of it."""
