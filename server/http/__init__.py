"""The HTTP door: JSON becomes generation.proto's messages, and their answers become JSON."""
