"""What is kept of a compile, and how the next process takes it up: between `compiler/` and the store in `cache/`."""
