"""One server of a cluster: an engine in a process that Ray started."""
