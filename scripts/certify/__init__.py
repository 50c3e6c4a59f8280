"""`draftsmith certify`: whether a server writes what its target would, seen from outside."""
