"""What training minimises: divergences and objectives, in full and in bounded memory."""
