"""One job of several processes: how it ends and resumes, and files that it alone writes."""
