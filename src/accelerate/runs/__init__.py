"""Runs of a project, as `log_with="local"` has written them: read, shown in a terminal, on a page, in one file.

Nothing here imports torch.
"""
