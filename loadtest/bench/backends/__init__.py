"""Other programs and Quill itself as backends under test, each in a process of its own."""
