"""The real Ray, in an environment of its own."""
