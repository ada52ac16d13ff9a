"""Objects of other training engines under the interface of this package's own."""
