"""What all frontends share: a request from its fields to the engine, and its outputs as text."""
