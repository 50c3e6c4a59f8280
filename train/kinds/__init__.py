"""What every kind of drafter answers."""
