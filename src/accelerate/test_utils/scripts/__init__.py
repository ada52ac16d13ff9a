"""Scripts that check an installation on the machine it is on."""
