"""The prefix cache's blocks on a disk, for a server's next start."""
