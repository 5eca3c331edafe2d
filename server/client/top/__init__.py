"""What all servers do at the moment, for those who run them."""
