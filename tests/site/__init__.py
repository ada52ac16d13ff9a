"""The documentation as a site, and other pages, in a real browser: `make site-test`, in an environment of its own."""
