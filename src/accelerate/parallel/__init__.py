"""The axes of a device mesh, and tensors that are spread over them."""
