"""Offloaded weights: their placeholders in a module, and how they are copied in before they are used."""
