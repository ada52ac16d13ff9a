"""The documentation site and the pages of runs, in a real browser. `make site-test` runs these, in an environment of its own."""
