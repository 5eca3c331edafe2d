"""HTTP itself: connections, bodies, streams of events, who is let in, errors."""
