"""What one asks before and after a checkpoint is run: does it fit (`plan`), and is all well with it (`check`)."""
