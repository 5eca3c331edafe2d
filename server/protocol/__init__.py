"""generation.proto becomes requests, and events become generation.proto: protobuf stops here."""
