"""`draftsmith adapt`: a deployed drafter learns from the traffic that it met, and is replaced only by a better one."""
