"""One job of several processes: how it ends, how it goes on, and what it alone writes."""
