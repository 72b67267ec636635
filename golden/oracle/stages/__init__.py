"""One module a stage. Each returns the tensors of one goldens file, by name, and facts for the manifest."""
