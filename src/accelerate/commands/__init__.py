"""The command line: parsing arguments and printing. What a command does lives in the package of its concept.

Nothing here imports torch to parse or to show help.
"""
