"""`draftsmith certify`: tests from outside whether a server writes what its target would."""
