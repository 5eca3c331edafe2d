"""What Linux and the processor are asked."""
