"""The one place where private names of torch are used: one file per topic, one function per need.

torch may rename or remove any of them in its next release. So each function here has a fallback by torch's public
API, which may be slower, or says in its docstring what is lost without the name; where that is a whole feature,
`missing.gone` makes the error that says so in one sentence. Nothing private is imported when one of these files is, but
when it is needed, or with a fallback right beside it. Importing `accelerate` and training on one device work whichever
name is gone: `tests/unit/test_torch_internals.py` hides each in turn, and keeps private names out of all other files.
"""
