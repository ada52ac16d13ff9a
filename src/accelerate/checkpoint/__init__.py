"""What a run leaves on disk to go on from: written whole or not at all, read without running anything in it."""
