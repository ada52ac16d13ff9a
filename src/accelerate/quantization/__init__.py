"""Models with weights in few bits."""
