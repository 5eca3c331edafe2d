"""Which of several servers is asked: numbers and names alone, no clock and no I/O."""
