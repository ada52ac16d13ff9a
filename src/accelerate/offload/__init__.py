"""Weights that lie elsewhere: what stands for them in a module, and how they are brought in before they are used."""
