"""Settings as plain data: enumerations, one file per plugin family, and what is read from the environment.

Nothing here imports torch when it is imported.
"""
