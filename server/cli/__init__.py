"""What a person types. Options import no grpc."""
