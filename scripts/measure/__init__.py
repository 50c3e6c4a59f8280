"""`draftsmith measure`: acceptance by replay, speed by the clock, and the costs that join them."""
