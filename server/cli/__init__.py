"""The command line. Modules that declare arguments import no grpc."""
