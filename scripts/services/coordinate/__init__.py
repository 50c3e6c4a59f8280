"""`draftsmith coordinate`: one endpoint for several inference servers, routed by rules, load and measured costs."""
