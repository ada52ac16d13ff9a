"""Starting runs: settings -> plan (pure) -> engine.

Nothing here imports torch, but `elastic`: the main module of the process that a launch of several becomes.
"""
